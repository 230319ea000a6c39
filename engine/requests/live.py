"""One request of the engine's users: what was asked, what came so far, and what is returned."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import Finished
from engine.core.request import Request, RequestId
from engine.core.tokens import Prompt
from engine.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.requests.prompts import TokenPrompt
from engine.sampling_params import RequestSampling
from engine.text.detokenize import IncrementalDetokenizer, decode_output, prompt_context
from engine.text.tokenizer import Tokenizer


class LiveRequest:
    """One request from its arrival to its output.

    Tokens are followed one by one only where somebody needs them (stop strings, streaming,
    logprobs); otherwise the kernel hands them over at the end. The output of one that `is_kept`
    belongs to one call and is handed to nobody else.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt: TokenPrompt,
        sampling: RequestSampling,
        arrival_ns: int,
        tokenizer: Tokenizer | None,
        streams: bool = False,
        is_kept: bool = False,
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.is_kept = is_kept
        self.params = params = sampling.params
        self.metrics = RequestMetrics(arrival_ns)
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self.logprobs = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt.token_ids)
        self._error: str | None = None
        self._is_spoiled = False  # the kernel's last token of it is none
        self._tokenizer = tokenizer if params.detokenize else None
        self._context: tuple[int, ...] = ()
        if self._tokenizer is not None:
            self._context = prompt_context(
                self._tokenizer, prompt.token_ids, byte_ids, params.skip_special_tokens
            )
        self._text: IncrementalDetokenizer | None = None
        if self._tokenizer is not None and (streams or params.stop_strings):
            self._text = IncrementalDetokenizer(
                self._tokenizer,
                params.stop_strings,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                context=self._context,
                byte_ids=byte_ids,
            )
        self.is_watched = streams or self._text is not None

    def kernel_request(self, max_model_len: int, priority: int = 0) -> Request:
        """What the scheduler needs to know of it."""
        params, prompt = self.params, self.prompt.token_ids
        return Request(
            self.request_id,
            Prompt(prompt),
            max(1, max_model_len - len(prompt)) if params.max_tokens is None else params.max_tokens,
            stop_token_ids=self.sampling.stop_token_ids,
            min_tokens=params.min_tokens,
            # Prompt tokens that are found in the cache would not be computed. Its own blocks it
            # may find again after a preemption, since their tokens were computed then.
            extra_keys=(("prompt_logprobs", str(self.request_id)),)
            if params.prompt_logprobs is not None
            else (),
            priority=priority,
        )

    def take_token(self, token_id: int) -> bool:
        """Follows one token; True if the request ends here, by a stop string or by an error."""
        self.token_ids.append(token_id)
        if self._text is None:
            return False
        try:
            return self._text.append(token_id)
        except Exception as error:  # a tokenizer is foreign code; it ends its request alone
            self._error = f"the text cannot be decoded: {type(error).__name__}: {error}"
            return True

    def spoil(self) -> None:
        """The model has no next token for it: its logits are NaN."""
        self._error = "the model's logits are NaN"
        self._is_spoiled = True

    def progress(self) -> RequestOutput:
        """The output so far, for streams."""
        text = "" if self._text is None else self._text.stable_text()
        output = CompletionOutput(0, text, list(self.token_ids), logprobs=self.logprobs)
        return self._output(output, finished=False)

    def finish(self, finished: Finished, end_ns: int) -> RequestOutput:
        """The final output; never raises."""
        token_ids = list(finished.output_token_ids)
        if self._is_spoiled:
            del token_ids[-1:]
        by_token = finished.reason == "stop" and not self._stopped_by_string
        text = self._final_text(token_ids, by_token)
        if self._error is not None and finished.reason != "abort":
            return self._end(token_ids, "error", None, text, end_ns)
        stop_reason = self._stop_reason(token_ids, finished.reason)
        return self._end(token_ids, finished.reason, stop_reason, text, end_ns)

    def fail(
        self, error: str, end_ns: int, token_ids: Sequence[int] | None = None
    ) -> RequestOutput:
        """The final output of a request that an error ended; never raises."""
        self._error = error
        known = list(self.token_ids if token_ids is None else token_ids)
        return self._end(known, "error", None, self._final_text(known, False), end_ns)

    @property
    def _stopped_by_string(self) -> bool:
        return self._text is not None and self._text.stop_string is not None

    def _final_text(self, token_ids: list[int], by_token: bool) -> str:
        if self._tokenizer is None:
            return ""
        try:
            # An aborted request may have been followed by one token more than it was given.
            if self._text is not None and len(self.token_ids) == len(token_ids):
                return self._text.finish(by_token)
            return decode_output(
                self._tokenizer,
                token_ids,
                by_token,
                skip_special_tokens=self.params.skip_special_tokens,
                include_stop=self.params.include_stop_str_in_output,
                context=self._context,
            )
        except Exception as error:  # a tokenizer is foreign code
            if self._error is None:
                self._error = f"the text cannot be decoded: {type(error).__name__}: {error}"
            return "" if self._text is None else self._text.text

    def _stop_reason(self, token_ids: list[int], reason: str) -> int | str | None:
        if reason != "stop":
            return None
        if self._text is not None and self._text.stop_string is not None:
            return self._text.stop_string
        last = token_ids[-1]
        return last if last in self.params.stop_token_ids else None

    def _end(
        self,
        token_ids: list[int],
        reason: str,
        stop_reason: int | str | None,
        text: str,
        end_ns: int,
    ) -> RequestOutput:
        self.metrics.finished_ns = end_ns
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if self.logprobs is None else self.logprobs[: len(token_ids)],
            error=self._error if reason == "error" else None,
        )
        return self._output(output, finished=True)

    def _output(self, output: CompletionOutput, *, finished: bool) -> RequestOutput:
        prompt = self.prompt
        return RequestOutput(
            self.request_id,
            prompt.text,
            prompt.token_ids,
            [output],
            finished,
            self.metrics,
            self.prompt_logprobs,
        )
