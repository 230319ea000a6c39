"""The folder of a model that is named as on the hub, wherever a model folder can stand.

    folder = model_folder("Qwen/Qwen3-0.6B")           # or NAME@REVISION, or a folder
    path = hub_file("Qwen/Qwen3-0.6B", "config.json")  # one file alone

The user's cache comes first and is enough if it holds what is needed; otherwise only the files
that are needed are fetched. Tokens, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` are obeyed as
`huggingface_hub` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.core.errors import ConfigError, InputError

_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX, "model-*-of-*.safetensors")


def is_hub_id(name: str) -> bool:
    """Whether a name is `owner/model` or `owner/model@revision` and no folder."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def model_folder(
    name: str, *, weights: bool = True, tokenizer: bool = True, option: str = "model"
) -> Path:
    """The folder of a model: `name` itself, or the hub's in the user's cache.

    `weights` and `tokenizer` say what is needed besides the configuration; `option` names the
    source of the name in errors.

    Raises:
        ConfigError: the name is neither a folder nor a hub id.
        InputError: the hub's model cannot be had; the message says why.
    """
    if Path(name).is_dir():
        return Path(name)
    repo, revision = _parts(name, option)
    wanted = [*_CONFIGS]
    wanted += _TOKENIZERS if tokenizer else ()
    wanted += _WEIGHTS if weights else ()
    held = _cached_folder(name, repo, revision)
    if held is not None and _is_enough(held, weights, tokenizer):
        return held
    try:
        folder = _fetch(name, repo, revision, wanted)
        if weights and not _has_weights(folder):  # under names of their own
            folder = _fetch(name, repo, revision, [*wanted, "*.safetensors"])
    except InputError:
        if held is None or not _is_enough(held, weights, False):
            raise
        return held  # offline, and only a tokenizer is missing, which not every model has
    if weights and not _has_weights(folder):
        raise InputError(f"{name!r}: no such folder; on the hub: {_no_weights(name)}")
    return folder


def hub_file(name: str, file: str) -> Path:
    """One file of a hub id's model, such as its config.json.

    Raises:
        ConfigError: the name is no hub id.
        InputError: the file cannot be had.
    """
    repo, revision = _parts(name, "model")
    from_cache = _hub(name).try_to_load_from_cache(repo, file, revision=revision)
    if isinstance(from_cache, str):
        return Path(from_cache)
    return Path(_asked(name, lambda: _hub(name).hf_hub_download(repo, file, revision=revision)))


def _parts(name: str, option: str) -> tuple[str, str | None]:
    match = _ID.fullmatch(name)
    if match is None:
        limit = "must be a folder in Hugging Face format or a hub id such as Qwen/Qwen3-0.6B"
        raise ConfigError(option, name, limit)
    return match[1], match[2]


def _hub(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 (an optional library)
    try:
        import huggingface_hub
    except ImportError:
        limit = "no such folder; a hub id needs the package huggingface_hub"
        raise ConfigError("model", name, limit) from None
    return huggingface_hub


def _cached_folder(name: str, repo: str, revision: str | None) -> Path | None:
    """The cached snapshot, whole or not."""
    config = _hub(name).try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _is_enough(folder: Path, weights: bool, tokenizer: bool) -> bool:
    has_tokenizer = any((folder / file).is_file() for file in _TOKENIZERS)
    return (has_tokenizer or not tokenizer) and (not weights or _has_weights(folder))


def _has_weights(folder: Path) -> bool:
    if (folder / "model.safetensors").is_file():
        return True
    index = folder / _INDEX
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # the loader says what is wrong with the index
    return all((folder / str(file)).is_file() for file in files)


def _no_weights(name: str) -> str:
    # Where the hub cannot be reached, the library is content with whatever the cache holds.
    if _hub(name).constants.HF_HUB_OFFLINE:
        return "the weights are not in the cache, and HF_HUB_OFFLINE is set"
    return "no *.safetensors weights, or only a part of them in the cache and the hub out of reach"


def _fetch(name: str, repo: str, revision: str | None, wanted: Sequence[str]) -> Path:
    hub = _hub(name)
    patterns = [*wanted]
    return Path(
        _asked(
            name,
            lambda: hub.snapshot_download(repo, revision=revision, allow_patterns=patterns),
        )
    )


def _asked(name: str, ask: Callable[[], str]) -> str:
    """What the hub answers, or one line that says why it does not."""
    from huggingface_hub import errors

    reasons: tuple[tuple[type[BaseException], str], ...] = (
        (errors.GatedRepoError, "access must be granted on the hub, and a token given (HF_TOKEN)"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.RepositoryNotFoundError, "no such model"),
        (errors.RemoteEntryNotFoundError, "the model lacks the file"),
        (errors.OfflineModeIsEnabled, "not in the cache, and HF_HUB_OFFLINE is set"),
        (errors.LocalEntryNotFoundError, "not in the cache, and the hub cannot be reached"),
    )
    try:
        return ask()
    except Exception as error:
        for kind, reason in reasons:
            if isinstance(error, kind):
                raise InputError(f"{name!r}: no such folder; on the hub: {reason}") from error
        if isinstance(error, OSError | ValueError) or type(error).__module__.startswith(
            ("httpx", "huggingface_hub", "requests")
        ):
            words = " ".join(str(error).split())[:200] or type(error).__name__
            raise InputError(f"{name!r}: no such folder; on the hub: {words}") from error
        raise
