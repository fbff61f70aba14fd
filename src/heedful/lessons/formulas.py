"""Formulas in TeX as a line of Unicode, for the terminal: $\\frac{QK^\\top}{\\sqrt{d}}$ is QKᵀ / √d.

It knows what lessons use; a command that it does not know keeps its name.
"""

from __future__ import annotations

import re

SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ",
    "sigma": "σ", "tau": "τ", "phi": "φ", "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ",
    "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Pi": "Π", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω",
    "cdot": "·", "times": "×", "pm": "±", "odot": "⊙", "otimes": "⊗", "oplus": "⊕", "circ": "∘", "ast": "∗",
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "sim": "∼", "equiv": "≡",
    "propto": "∝", "ll": "≪", "gg": "≫", "in": "∈", "notin": "∉", "subset": "⊂", "cup": "∪", "cap": "∩",
    "sum": "Σ", "prod": "Π", "int": "∫", "partial": "∂", "nabla": "∇", "infty": "∞", "to": "→", "rightarrow": "→",
    "leftarrow": "←", "mapsto": "↦", "Rightarrow": "⇒", "mid": "|", "vert": "|", "lVert": "‖", "rVert": "‖",
    "Vert": "‖", "|": "‖", "top": "ᵀ", "intercal": "ᵀ", "prime": "′", "ell": "ℓ", "dots": "…", "ldots": "…",
    "cdots": "⋯", "vdots": "⋮", "ddots": "⋱", "forall": "∀", "exists": "∃", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈",
    "rceil": "⌉", "langle": "⟨", "rangle": "⟩", "{": "{", "}": "}", "%": "%", "_": "_", "#": "#", "&": "&", "$": "$",
    ",": " ", ";": " ", ":": " ", "!": "", " ": " ", "quad": "  ", "qquad": "    ", "\\": "\n",
    "left": "", "right": "", "big": "", "Big": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "", "bigg": "",
    "displaystyle": "", "limits": "", "nolimits": "",
}  # fmt: skip
RELATIONS = set("=<>≤≥≠≈∼≡∝≪≫∈∉⊂→←↦⇒±×·⊙⊗⊕")
PLAIN = {"text", "mathrm", "mathbf", "mathit", "mathsf", "mathcal", "operatorname", "textbf", "textit", "boldsymbol",
         "bm", "texttt", "mathtt", "underbrace", "overbrace"}  # fmt: skip
ACCENTS = {"hat": "\u0302", "bar": "\u0304", "tilde": "\u0303", "vec": "\u20d7", "dot": "\u0307", "overline": "\u0305"}
DOUBLE = {"R": "ℝ", "N": "ℕ", "Z": "ℤ", "E": "𝔼", "P": "ℙ", "1": "𝟙"}
SUPERSCRIPT = dict(zip("0123456789+-=()inTxℓᵀ′*k", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁱⁿᵀˣˡᵀ′*ᵏ", strict=True))
SUBSCRIPT = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))
TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|[{}^_&~]|\s+|[^\\{}^_&~\s]", re.DOTALL)
IN_MARKDOWN = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`)"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<![\\$\w])\$(?P<line>\S|\S[^$\n]*?\S)\$(?!\d)",
    re.MULTILINE | re.DOTALL,
)


def readable_formulas(markdown: str) -> str:
    """Markdown with its formulas as code: a block of its own for $$...$$, within the line for $...$."""

    def replaced(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        if found["block"]:
            lines = "\n".join(f"    {line}" for line in unicode_formula(found["block"]).splitlines())
            return f"\n\n```text\n{lines}\n```\n\n"
        return f"`{unicode_formula(found['line'])}`"

    return IN_MARKDOWN.sub(replaced, markdown)


def unicode_formula(tex: str) -> str:
    """A formula as text."""
    tokens = TOKEN.findall(tex)
    text = "".join(_parse(tokens, until=None))
    text = re.sub(r"∂ (?=\w)", "∂", text)
    text = re.sub(r"[ \t]+", " ", re.sub(r" *\n *", "\n", text))
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def _parse(tokens: list[str], until: str | None) -> list[str]:
    """The pieces up to a closing token, which is consumed with them."""
    pieces: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token == until:
            break
        if token in ("^", "_"):
            pieces.append(_script(token, _argument(tokens)))
        elif token.startswith("\\") and token[1:].rstrip("*") in ("begin", "end"):
            _argument(tokens)
        elif token.startswith("\\"):
            pieces.append(_command(token[1:].rstrip("*"), tokens))
        elif token in ("&", "~") or token.isspace():
            pieces.append(" ")
        elif token == "{":
            pieces += _parse(tokens, "}")
        elif token in RELATIONS:
            pieces.append(f" {token} ")
        else:
            pieces.append(token)
    return pieces


def _argument(tokens: list[str]) -> str:
    """What follows a command: a group in braces, or one token."""
    while tokens and tokens[0].isspace():
        tokens.pop(0)
    if not tokens:
        return ""
    token = tokens.pop(0)
    if token == "{":
        return "".join(_parse(tokens, "}")).strip()
    return _command(token[1:], tokens) if token.startswith("\\") else token


def _command(name: str, tokens: list[str]) -> str:
    if name in ("frac", "tfrac", "dfrac"):
        above, below = _argument(tokens), _argument(tokens)
        return f"{_grouped(above)} / {_grouped(below)}"
    if name == "sqrt":
        return f"√{_grouped(_argument(tokens))}"
    if name in PLAIN:
        return _argument(tokens)
    if name in ACCENTS:
        base = _argument(tokens)
        return base[:1] + ACCENTS[name] + base[1:]
    if name == "mathbb":
        base = _argument(tokens)
        return DOUBLE.get(base, base)
    symbol = SYMBOLS.get(name)
    if symbol is None:
        spaced = tokens and tokens[0] in ("\\frac", "\\sqrt", "\\sum")
        return f"{name} " if spaced else name  # log, exp, max, softmax
    return f" {symbol} " if symbol in RELATIONS else symbol


def _grouped(text: str) -> str:
    """In brackets, unless it is one thing: a name, a number, a root, or something in brackets."""
    one = re.fullmatch(r"(?:√|∂ ?)?[\w.ᵀ′ₐ-ₜ⁰-₎\u0300-\u036f‖|]*|[\w√]*\([^()]*\)", text)
    return text if one else f"({text})"


def _script(kind: str, text: str) -> str:
    """A superscript or a subscript, in small letters where Unicode has them all."""
    if kind == "^" and text in ("ᵀ", "′", "*"):
        return text
    letters = SUPERSCRIPT if kind == "^" else SUBSCRIPT
    compact = text.replace(" ", "")
    if compact and all(letter in letters for letter in compact):
        return "".join(letters[letter] for letter in compact)
    return f"{kind}{text}" if len(text) == 1 else f"{kind}{_grouped(text) if kind == '_' else f'({text})'}"
