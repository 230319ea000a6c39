"""Defects of the engine's facade: one attribute of one of its classes replaced.

Only named here, so that nothing of the engine (and no torch) is imported; the facade's suite in
tests/engine plants them and runs an engine on a stand-in for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_REGISTRY = "engine.requests.registry:RequestRegistry"
_LIVE = "engine.requests.live:LiveRequest"
_LOOP = "engine.step.loop:StepLoop"
_BUILDER = "engine.step.builder:StepBuilder"


@dataclass(frozen=True, slots=True)
class FacadeDefect:
    """`make` turns the attribute `place` into a broken one."""

    name: str
    what: str
    place: str  # module:Class.attribute
    make: Callable[[Any], Any]
    grows: bool = False  # nothing is lost; what is kept grows with the requests

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The engine with the defect."""
        module, _, path = self.place.partition(":")
        owner, _, attribute = path.partition(".")
        kind = getattr(import_module(module), owner)
        whole = kind.__dict__[attribute]
        setattr(kind, attribute, self.make(whole))
        try:
            yield
        finally:
            setattr(kind, attribute, whole)


def _nothing(original: Any) -> Any:  # noqa: ANN401
    return lambda *arguments: None


def _take_all_but_the_last(original: Any) -> Any:  # noqa: ANN401
    return lambda self: original(self)[:-1]


def _take_and_keep(original: Any) -> Any:  # noqa: ANN401
    return lambda self: [output for name, output in self._ended.items() if name not in self._kept]


def _take_everything(original: Any) -> Any:  # noqa: ANN401
    return lambda self: self._hand_over([*self._ended])


def _forget_all(original: Any) -> Any:  # noqa: ANN401
    def fail_all(self: Any, error: str, end_ns: int) -> None:  # noqa: ANN401
        self._watched.clear()
        self._running.clear()

    return fail_all


def _fail_what_has_ended_too(original: Any) -> Any:  # noqa: ANN401
    def fail_all(self: Any, error: str, end_ns: int) -> None:  # noqa: ANN401
        self._ended.clear()
        original(self, error, end_ns)

    return fail_all


def _only_the_first_end(original: Any) -> Any:  # noqa: ANN401
    def record(self: Any, step: Any) -> None:  # noqa: ANN401
        for finished in step.outcome.finished[:1]:
            self.finish(finished, step.end_ns)

    return record


def _nobody_stops(original: Any) -> Any:  # noqa: ANN401
    def watch(self: Any, plan: Any, token_ids: Any) -> list[object]:  # noqa: ANN401
        original(self, plan, token_ids)
        return []

    return watch


def _an_end_like_any(original: Any) -> Any:  # noqa: ANN401
    def fail(self: Any, error: str, end_ns: int, token_ids: Any = None) -> object:  # noqa: ANN401
        return self._end(list(self.token_ids), "length", None, "", end_ns)

    return fail


def _discard_only_here(original: Any) -> Any:  # noqa: ANN401
    def discard_open(self: Any, cause: str) -> None:  # noqa: ANN401
        self._builder.forget_rows()
        self._open.clear()

    return discard_open


def _keep_the_slot(original: Any) -> Any:  # noqa: ANN401
    def end(self: Any, finished: Any, end_ns: int, error: str = "") -> None:  # noqa: ANN401
        self.requests.finish(finished, end_ns, error)

    return end


def _keep_the_kernel(original: Any) -> Any:  # noqa: ANN401
    def start_over(self: Any, cause: str) -> None:  # noqa: ANN401
        self._open.clear()
        self.requests.fail_all(cause, self.now_ns())

    return start_over


def _trust_the_kernel(original: Any) -> Any:  # noqa: ANN401
    def undo(self: Any, error: object) -> None:  # noqa: ANN401
        self.executor.reset()
        self._discard_open("?")
        self._is_torn = False

    return undo


def _leave_it(original: Any) -> Any:  # noqa: ANN401
    def leave(self: Any, *error: object) -> None:  # noqa: ANN401
        self._is_busy = False

    return leave


def _only_what_runs(original: Any) -> Any:  # noqa: ANN401
    return property(lambda self: self._requests.num_running > 0)


def _look_and_leave(original: Any) -> Any:  # noqa: ANN401
    return lambda self, request_id: self._ended.get(request_id)


def _abort_as_stop(original: Any) -> Any:  # noqa: ANN401
    def finish(self: Any, finished: Any, end_ns: int) -> object:  # noqa: ANN401
        reason = "length" if finished.reason == "abort" else finished.reason
        return original(self, finished._replace(reason=reason), end_ns)

    return finish


def _everybody_is_wanted(original: Any) -> Any:  # noqa: ANN401
    def finish(self: Any, *arguments: Any) -> None:  # noqa: ANN401
        self._unwanted.clear()
        original(self, *arguments)

    return finish


def _one_token_late(original: Any) -> Any:  # noqa: ANN401
    def take_token(self: Any, token_id: int) -> bool:  # noqa: ANN401
        late, self.__dict__["_late"] = self.__dict__.get("_late", False), original(self, token_id)
        return bool(late)

    return take_token


def _errors_without_tokens(original: Any) -> Any:  # noqa: ANN401
    def fail(self: Any, error: str, end_ns: int, token_ids: Any = None) -> object:  # noqa: ANN401
        return original(self, "", end_ns, [9999, *(token_ids or ())])

    return fail


def _first_of_the_failed(original: Any) -> Any:  # noqa: ANN401
    def end(self: Any, finished: Any, end_ns: int, error: str = "") -> None:  # noqa: ANN401
        if not error or not self.__dict__.get("_spared"):
            original(self, finished, end_ns, error)
        self.__dict__["_spared"] = bool(error)

    return end


def _claim_and_keep_the_name(original: Any) -> Any:  # noqa: ANN401
    return lambda self, names: self._hand_over([n for n in names if n in self._ended])


def _watch_for_ever(original: Any) -> Any:  # noqa: ANN401
    def finish(self: Any, finished: Any, *rest: Any) -> None:  # noqa: ANN401
        watched = self._watched.get(finished.request_id)
        original(self, finished, *rest)
        if watched is not None:
            self._watched[finished.request_id] = watched

    return finish


def _keep_the_names(original: Any) -> Any:  # noqa: ANN401
    def disown(self: Any, request_ids: Any) -> None:  # noqa: ANN401
        kept = {*self._kept}
        original(self, request_ids)
        self._kept |= kept

    return disown


FACADE_DEFECTS: tuple[FacadeDefect, ...] = (
    FacadeDefect("LosesOneOutput", "step() drops one output", f"{_REGISTRY}.take",
                 _take_all_but_the_last),
    FacadeDefect("GivesTwice", "step() hands over twice", f"{_REGISTRY}.take", _take_and_keep),
    FacadeDefect("GivesWhatOthersOwn", "step() hands over outputs of a call or stream",
                 f"{_REGISTRY}.take", _take_everything),
    FacadeDefect("ForgetsTheOldKernels", "a fresh kernel forgets the old one's requests",
                 f"{_REGISTRY}.fail_all", _forget_all),
    FacadeDefect("ReplacesOutputs", "a failure replaces outputs that wait",
                 f"{_REGISTRY}.fail_all", _fail_what_has_ended_too),
    FacadeDefect("OwnsNothingOff", "outputs of a failed call come up later",
                 f"{_REGISTRY}.disown", _nothing),
    FacadeDefect("WantsEverybody", "an abandoned request's output comes up when it ends",
                 f"{_REGISTRY}.finish", _everybody_is_wanted),
    FacadeDefect("OneEndAStep", "only one request can end in a step", f"{_REGISTRY}.record",
                 _only_the_first_end),
    FacadeDefect("StopsNobody", "stop strings stop nobody", f"{_REGISTRY}.watch", _nobody_stops),
    FacadeDefect("StopsLate", "a stop string ends its request one token late",
                 f"{_LIVE}.take_token", _one_token_late),
    FacadeDefect("LooksAndLeaves", "abort() returns an output that step() returns again",
                 f"{_REGISTRY}.claim_one", _look_and_leave),
    FacadeDefect("AbortsAsLength", "an aborted request is told as ended by its length",
                 f"{_LIVE}.finish", _abort_as_stop),
    FacadeDefect("ErrorsLikeEnds", "an error looks like an end", f"{_LIVE}.fail",
                 _an_end_like_any),
    FacadeDefect("ErrorsWithForeignTokens", "a failed request returns a token that it never got",
                 f"{_LIVE}.fail", _errors_without_tokens),
    FacadeDefect("DiscardsOnlyHere", "open plans are not discarded in the kernel",
                 f"{_LOOP}._discard_open", _discard_only_here),
    FacadeDefect("TellsTheFirstFailed", "of those that a step fails every second is not told",
                 f"{_LOOP}._end", _first_of_the_failed),
    FacadeDefect("KeepsTheSlot", "an ended request keeps its slot", f"{_LOOP}._end",
                 _keep_the_slot),
    FacadeDefect("GoesOnTorn", "a torn kernel goes on", f"{_LOOP}._start_over", _keep_the_kernel),
    FacadeDefect("TakenForWhole", "a torn kernel is taken for whole", f"{_LOOP}.undo",
                 _trust_the_kernel),
    FacadeDefect("UndoesNothing", "nothing is undone", "engine.step.loop:_Guard.__exit__",
                 _leave_it),
    FacadeDefect("NeverFreesASlot", "a slot is never freed", f"{_BUILDER}.remove", _nothing),
    FacadeDefect("AnnouncesNothing", "outputs that wait are not announced",
                 "engine.llm:LLM.has_unfinished_requests", _only_what_runs),
    FacadeDefect("KeepsClaimedNames", "names of outputs that were claimed are kept",
                 f"{_REGISTRY}.claim", _claim_and_keep_the_name, grows=True),
    FacadeDefect("WatchesForEver", "ended requests are watched on", f"{_REGISTRY}.finish",
                 _watch_for_ever, grows=True),
    FacadeDefect("KeepsAbandonedNames", "names of abandoned requests are kept",
                 f"{_REGISTRY}.disown", _keep_the_names, grows=True),
    FacadeDefect("LeavesStreamsOpen", "a stream that is closed leaves its requests running",
                 "engine.requests.stream:OutputStream.close", _nothing, grows=True),
)  # fmt: skip
