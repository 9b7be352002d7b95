"""From chosen tokens to what the client sees, and the end of an answer.

An answer ends with the first of: an end-of-sequence token (unless `ignore_eos`), a stop token, a
stop string, `tokens_max` tokens. The token that ends it as a stop is counted and reported, its
text is not shown.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from pdcluster_engine.sampling import Sampled
from pdcluster_engine.submission import FinishReason, Output, Submission
from pdcluster_engine.text import Detokenizer, TextCodec

_CONTEXT_TOKENS = 6
"""Some tokenizers write a leading space only where they see that something stands before it."""
_REPLACEMENT = "\ufffd"


class Answer:
    """The output side of one sequence."""

    __slots__ = ("_count", "_detokenizer", "_ends", "_tokens_max")

    def __init__(
        self,
        submission: Submission,
        codec: TextCodec,
        *,
        eos_ids: AbstractSet[int],
        tokens_max: int,
    ) -> None:
        self._detokenizer = Detokenizer(
            codec,
            stop=submission.stop_strings,
            skip_special_tokens=submission.skip_special_tokens,
            prompt_ids=_context(submission, codec),
        )
        eos = frozenset() if submission.ignore_eos else frozenset(eos_ids)
        self._ends = eos | submission.stop_token_ids
        self._tokens_max = tokens_max
        self._count = 0

    def take(self, sampled: Sampled) -> Output:
        """The next token's output; `finish` is set when it is the last one."""
        self._count += 1
        if sampled.token_id in self._ends:
            text = self._detokenizer.finish()
            return _output(sampled, text, finish=FinishReason.STOP, stop=sampled.token_id)
        text = self._detokenizer.push(sampled.token_id)
        last = self._count >= self._tokens_max
        if last:
            text += self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            stop = self._detokenizer.stopped
            return _output(sampled, text, finish=FinishReason.STOP, stop=stop)
        return _output(sampled, text, finish=FinishReason.LENGTH if last else None)


def _output(
    sampled: Sampled,
    text: str,
    *,
    finish: FinishReason | None,
    stop: str | int | None = None,
) -> Output:
    return Output(
        token_id=sampled.token_id,
        text=text,
        logprob=sampled.logprob,
        top_logprobs=sampled.top_logprobs,
        finish=finish,
        stop=stop,
    )


def _context(submission: Submission, codec: TextCodec) -> tuple[int, ...]:
    """The prompt's last tokens, unless they end or begin inside a character."""
    context = submission.token_ids[-_CONTEXT_TOKENS:]
    return () if _REPLACEMENT in codec.decode(context) else context
