"""The requests of the engine's users: what was asked, what came so far, and what is returned."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import Finished, StepPlan
from engine.core.request import RequestId
from engine.requests.detokenize import IncrementalDetokenizer, decode_output
from engine.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.requests.prompts import Tokenizer, TokenPrompt
from engine.sampling_params import SamplingParams
from engine.step.loop import StepEvents


class LiveRequest:
    """One request from its arrival to its output.

    Tokens are followed one by one only where somebody needs them (stop strings, streaming,
    logprobs); otherwise the kernel hands them over at the end.
    """

    def __init__(
        self,
        number: int,
        prompt: TokenPrompt,
        params: SamplingParams,
        arrival_ns: int,
        tokenizer: Tokenizer | None,
        streams: bool,
    ) -> None:
        self.number = number
        self.request_id: RequestId = number
        self.prompt = prompt
        self.params = params
        self.metrics = RequestMetrics(arrival_ns)
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self.logprobs = []
        self._tokenizer = tokenizer if params.detokenize else None
        self._text: IncrementalDetokenizer | None = None
        if self._tokenizer is not None and (streams or params.stop_strings):
            self._text = IncrementalDetokenizer(
                self._tokenizer,
                params.stop_strings,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
            )
        self.is_watched = streams or self._text is not None

    def take_token(self, token_id: int) -> bool:
        """Follows one token; True if a stop string ends the request here."""
        self.token_ids.append(token_id)
        return self._text is not None and self._text.append(token_id)

    def progress(self) -> RequestOutput:
        """The output so far, for streams."""
        text = "" if self._text is None else self._text.stable_text()
        output = CompletionOutput(0, text, list(self.token_ids), logprobs=self.logprobs)
        return self._output(output, finished=False)

    def finish(self, finished: Finished, end_ns: int) -> RequestOutput:
        """The final output."""
        self.metrics.finished_ns = end_ns
        token_ids = list(finished.output_token_ids)
        by_token = finished.reason == "stop" and not self._stopped_by_string
        output = CompletionOutput(
            index=0,
            text=self._final_text(token_ids, by_token),
            token_ids=token_ids,
            finish_reason=finished.reason,
            stop_reason=self._stop_reason(token_ids, finished.reason),
            logprobs=None if self.logprobs is None else self.logprobs[: len(token_ids)],
        )
        return self._output(output, finished=True)

    @property
    def _stopped_by_string(self) -> bool:
        return self._text is not None and self._text.stop_string is not None

    def _final_text(self, token_ids: list[int], by_token: bool) -> str:
        if self._tokenizer is None:
            return ""
        # An aborted request may have been followed by one token more than it was given.
        if self._text is not None and len(self.token_ids) == len(token_ids):
            return self._text.finish(by_token)
        return decode_output(
            self._tokenizer,
            token_ids,
            by_token,
            skip_special_tokens=self.params.skip_special_tokens,
            include_stop=self.params.include_stop_str_in_output,
        )

    def _stop_reason(self, token_ids: list[int], reason: str) -> int | str | None:
        if reason != "stop":
            return None
        if self._text is not None and self._text.stop_string is not None:
            return self._text.stop_string
        last = token_ids[-1]
        return last if last in self.params.stop_token_ids else None

    def _output(self, output: CompletionOutput, *, finished: bool) -> RequestOutput:
        prompt = self.prompt
        return RequestOutput(
            self.request_id, prompt.text, prompt.token_ids, [output], finished, self.metrics
        )


class RequestTable:
    """All live requests of one engine, and what each committed step means for them."""

    def __init__(self) -> None:
        self._live: dict[RequestId, LiveRequest] = {}
        self._watched: dict[RequestId, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def add(self, request: LiveRequest) -> None:
        """Registers a request."""
        self._live[request.request_id] = request
        if request.is_watched:
            self._watched[request.request_id] = request

    def ids(self) -> list[RequestId]:
        """Ids of the live requests, oldest first."""
        return [*self._live]

    def watch(self, plan: StepPlan, token_ids: Sequence[int]) -> list[RequestId]:
        """Shows new tokens to those that follow them; returns whom a stop string ends."""
        if not self._watched:
            return []
        stopped = []
        for request_id, token_id in zip(plan.sampled_ids, token_ids, strict=True):
            request = self._watched.get(request_id)
            if request is not None and request.take_token(token_id):
                stopped.append(request_id)
        return stopped

    def record(self, events: StepEvents) -> list[RequestOutput]:
        """Books a committed step and returns the outputs of requests that ended."""
        plan, end_ns = events.plan, events.end_ns
        for request_id in plan.preempted:
            if request_id in self._live:
                self._live[request_id].metrics.num_preemptions += 1
        for admission in plan.admitted:
            request = self._live.get(admission.request_id)
            if request is not None and request.metrics.first_scheduled_ns is None:
                request.metrics.first_scheduled_ns = events.start_ns
                request.metrics.num_cached_tokens = admission.hit_tokens
        for chunk in plan.chunks:
            request = self._live.get(chunk.request_id) if chunk.samples else None
            if request is not None and request.metrics.first_token_ns is None:
                request.metrics.first_token_ns = end_ns
        if events.logprobs is not None:
            self._record_logprobs(events)
        return [self.finish(finished, end_ns) for finished in events.outcome.finished]

    def finish(self, finished: Finished, end_ns: int) -> RequestOutput:
        """Ends a request and returns its output."""
        request = self._live.pop(finished.request_id)
        self._watched.pop(finished.request_id, None)
        return request.finish(finished, end_ns)

    def progress(self, request_ids: Sequence[RequestId]) -> list[RequestOutput]:
        """Outputs so far of those requests that are still live."""
        return [self._live[name].progress() for name in request_ids if name in self._live]

    def _record_logprobs(self, events: StepEvents) -> None:
        columns = events.logprobs
        assert columns is not None
        # A step voids entries of requests that ended before, so the plan's ids are what counts.
        for row, request_id in enumerate(events.plan.sampled_ids):
            request = self._live.get(request_id)
            if request is None or request.logprobs is None or request.params.logprobs is None:
                continue
            count = request.params.logprobs
            best = zip(columns.top_ids[row][:count], columns.top_logprobs[row], strict=False)
            entry = {
                token_id: Logprob(value, rank) for rank, (token_id, value) in enumerate(best, 1)
            }
            token_id = events.token_ids[row]
            entry.setdefault(token_id, Logprob(columns.sampled[row], columns.ranks[row]))
            request.logprobs.append(entry)
