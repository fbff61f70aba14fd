"""JSON schemas for generation: the defaults that help a model to write JSON and to end it.

JSON is written as Python's json.dumps does: white space that may be longer is never ended by small models. An object
has the properties that its schema names, and others only if `additionalProperties` says so, as in OpenAI's strict
schemas: JSON Schema would allow any others, and models that are good at nothing else can always add one more. Both
narrow what the schema allows, and a schema can say otherwise: by `additionalProperties`, and by llguidance's
`x-guidance`.
"""

from __future__ import annotations

from typing import Any

FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What an object's properties may come from beside `properties`.
OTHER_PROPERTIES = {
    "additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "anyOf", "oneOf", "if",
}  # fmt: skip
SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")


def with_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the defaults where it does not say otherwise."""
    form = {**FORM, **schema.get("x-guidance", {})}
    return {**(schema if _merges(schema) else _closed(schema)), "x-guidance": form}


def _merges(schema: Any) -> bool:
    """Whether schemas are merged somewhere (allOf): none of them may be closed, since it knows only its own part."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if "allOf" in part:
                return True
            left += part.values()
        elif isinstance(part, list):
            left += part
    return False


def _closed(schema: Any) -> Any:
    """The schema and those in it without properties that they do not name."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in SCHEMAS_BY_NAME:
        if isinstance(schema.get(name), dict):
            found[name] = {key: _closed(part) for key, part in schema[name].items()}
    if isinstance(schema.get("items"), dict):
        found["items"] = _closed(schema["items"])
    if "properties" in schema and not OTHER_PROPERTIES & set(schema):
        found["additionalProperties"] = False
    elif "properties" not in schema and "required" not in schema:
        for name in "anyOf", "oneOf", "prefixItems":
            if isinstance(schema.get(name), list):
                found[name] = [_closed(part) for part in schema[name]]
    return found


def patterns_of(schemas: list[Any]) -> list[str]:
    """The regular expressions in schemas; also what only looks like one."""
    found, left = list[str](), [*schemas]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
            found += [part["pattern"]] if isinstance(part.get("pattern"), str) else []
            found += part["patternProperties"] if isinstance(part.get("patternProperties"), dict) else []
        elif isinstance(part, list):
            left += part
    return found
