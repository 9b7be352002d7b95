"""Fields that would change the answer and are not built: refused by name, never ignored.

An empty value (`null`, `false`, `""`, `[]`, `{}`) asks for nothing and passes, and so does a value
that asks for what happens anyway.
"""

from __future__ import annotations

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.requests.fields import Fields

ANYWAY: dict[str, object] = {
    "tool_choice": "none",
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "best_of": 1,
    "min_tokens": 0,
    "min_new_tokens": 0,
    "logprob_start_len": -1,
    "length_penalty": 1.0,
    "add_generation_prompt": True,
    "no_stop_trim": False,
}
"""The value, for fields that have one, that changes nothing."""

UNSUPPORTED = frozenset(ANYWAY) | {
    # tools and structure
    "tools",
    "functions",
    "logit_bias",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "allowed_token_ids",
    "bad_words",
    "custom_logit_processor",
    "stop_regex",
    # other shapes of prompt and answer
    "suffix",
    "echo",
    "audio",
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "prompt_embeds",
    "prompt_logprobs",
    "token_ids_logprob",
    "return_hidden_states",
    "return_text_in_logprobs",
    "return_prompt_text_in_logprobs",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "use_beam_search",
    "session_params",
    "lora_path",
    # what a chat template would be given
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
}


def refuse_unsupported(fields: Fields) -> None:
    """Look at every field of one object.

    Raises:
        InvalidRequest: `Unsupported`, naming the first field that asks for something not built.
    """
    for name in fields.raw:
        if name in UNSUPPORTED:
            value = fields.value(name, object, "be JSON")
            # 0 equals False, but asks for something where a number is expected.
            empty = value is None or value is False or value in ("", [], {})
            if not empty and (name not in ANYWAY or value != ANYWAY[name]):
                must = "be absent: it would change the answer and is not supported"
                raise fields.refusal(name, must, reason=Reason.UNSUPPORTED)
