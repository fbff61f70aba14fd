"""Fields of other servers' APIs that would change an answer and are not implemented: refused by their names.

Each with the values that have no effect here, and are accepted: many user interfaces send every field with its default.
Those that only tune another one (mirostat_tau, dry_base) are not listed: alone they change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NoEffect = tuple[Any, ...]

SAMPLING: Mapping[str, NoEffect] = {
    # structured output
    "guided_whitespace_pattern": (),
    "format": ("",),
    # beam and contrastive search
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "penalty_alpha": (0,),
    # samplers: vLLM, llama-server, text-generation-webui, TGI
    "repeat_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "dynamic_temperature": (False,),
    "temperature_last": (False,),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "samplers": ([],),
    "sampler_priority": ([],),
    "do_sample": (True,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "logits_processors": ([],),
    # which tokens
    "bad_words": ([],),
    "bad_words_ids": ([],),
    "allowed_token_ids": ([],),
    "custom_token_bans": ("",),
    "banned_tokens": ([],),
    "ban_eos_token": (False,),
    # other names of fields that are implemented
    "n_predict": (-1,),
    "num_predict": (-1,),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "max_length": (),
    "stop_sequences": ([],),
    "stopping_strings": ([],),
    "rep_pen": (1,),
    "options": ({},),
    # what is sent back
    "prompt_logprobs": (),
    "n_probs": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "t_max_predict_ms": (0, -1),
    "thinking_token_budget": (),
    # inputs
    "lora": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "image_data": ([],),
    "n_keep": (0,),
}

COMPLETION: Mapping[str, NoEffect] = {
    **SAMPLING,
    "prompt_embeds": (),
    "input_extra": ([],),
    "add_bos_token": (True,),
}

MESSAGE: Mapping[str, NoEffect] = {
    "function_call": (),
    "audio": (),
}

CHAT: Mapping[str, NoEffect] = {
    **SAMPLING,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "verbosity": ("medium",),
    "chat_template": (),
}

RESPONSES: Mapping[str, NoEffect] = {
    **SAMPLING,
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "include": ([],),
    "max_tokens": (),  # max_output_tokens
    "max_completion_tokens": (),
    "moderation": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
    "response_format": ({"type": "text"},),  # text.format
    "top_logprobs": (0,),
}

RESPONSES_TEXT: Mapping[str, NoEffect] = {"verbosity": ("medium",)}

ANTHROPIC_OUTPUT: Mapping[str, NoEffect] = {"effort": ("high",)}

ANTHROPIC_MESSAGES: Mapping[str, NoEffect] = {
    **{name: accepted for name, accepted in SAMPLING.items() if name != "stop_sequences"},
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "output_format": (),  # output_config.format
    "response_format": ({"type": "text"},),
    "thinking": ({"type": "disabled"},),
}

EMBEDDING: Mapping[str, NoEffect] = {
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "truncate": (False, "NONE", "none"),
    "normalize": (),
    "pooling": (),
    "prompt_name": (),
    "instruction": ("",),
    "input_type": (),
    "task": (),
    "late_chunking": (False,),
    "embedding_type": ("float",),
    "embed_dtype": ("float32",),
}
