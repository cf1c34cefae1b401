"""Models of the Hugging Face hub by name, in the cache of `huggingface_hub`.

The library is imported when a name needs it. It compares the size of a download with the hub's,
and resumes a cut one while it runs; SHA-256 is verified here, before a file is used."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.config import ConfigError
from penstock.engine.models.checkpoint import INDEX_FILE, SINGLE_FILE, part_names

Say = Callable[[str], None]
"""Receiver of lines for the user."""
Progress = Callable[[str, int, int], None]
"""Receiver of a file's name, its bytes so far, and all of them."""

_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
    r"(?:@(?P<revision>refs/pr/\d+|\w[\w.-]*))?"
    r"(?::(?P<quant>\w[\w.-]*)|/(?P<file>\w[\w./ -]*\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_FOLDER_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)"
    r"\.json|modules\.json|\w+_Pooling/config\.json"
    r"|tokenizer\.model|merges\.txt|chat_template\.(jinja|json)"
    r"|additional_chat_templates/[\w-]+\.jinja"
)
"""Files of a folder beside its weights; `.bin`, `.onnx` and `original/` are not among them."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")
_TAG = re.compile(r"(?:.*[-._/])?((?:I?Q|TQ|MXFP)\d\w*|BF16|F16|F32)", re.IGNORECASE)
"""The quantisation at the end of a GGUF file's name."""
_DEFAULT_QUANT, _DEFAULT_BITS = "Q4_K_M", 4
_NO_MODEL = ("mmproj", "imatrix")
"""In names of GGUF files that are no language models."""
_MAIN = "main"
_MARK = ".penstock-unverified"
"""File beside a repository's snapshots, with the name of a file until that is verified."""
_LOOK_S, _LINE_S = 0.5, 30.0
"""Seconds between looks at a download, and the most between lines about it."""
_OFFLINE = "OfflineModeIsEnabled"
"""The library's error under HF_HUB_OFFLINE."""


class HubName(NamedTuple):
    """A parsed name: `owner/name[@revision]`, with `:QUANT` or `/FILE.gguf` for a GGUF file."""

    text: str
    repo: str
    revision: str
    quant: str | None
    file: str | None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the parts; None for a text that is no name on the hub."""
        found = _NAME.fullmatch(text)
        if found is None or found["repo"].lower().endswith(".gguf"):
            return None
        return cls(text, found["repo"], found["revision"] or _MAIN, found["quant"], found["file"])


class CachedModel(NamedTuple):
    """A whole model in the cache. format: `safetensors`, or `GGUF` and the quantisation."""

    name: str
    format: str
    num_bytes: int
    path: Path


class _Choice(NamedTuple):
    """Files of a model in a repository. main: config.json, or a GGUF model's first file."""

    names: list[str]
    main: str

    def path(self, folder: Path) -> Path:
        return folder / self.main if self.main.endswith(".gguf") else folder


def fetch(name: HubName, say: Say, progress: Progress = lambda *_: None) -> Path:
    """Return a model's folder or (first) GGUF file, downloading what the cache lacks.

    progress: called twice a second during a download. The cached copy is used where the hub does
    not answer. Raises ConfigError, one line that says what to do."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except Exception as error:  # of httpx, of the library, or of what it makes of the answer
        found = cached(name, say)
        if found is None:
            raise ConfigError(_advice(name, error)) from error
        if _OFFLINE not in _kinds(error):
            say(f"{name.text}: the cached copy is used ({_short(error)})")
        return found
    files = {f.rfilename: f for f in info.siblings or () if _is_plain(f.rfilename, f.size)}
    choice = _chosen(name, files, say)
    return choice.path(_downloaded(name, choice, files, str(info.sha), say, progress))


def cached(name: HubName, say: Say = lambda line: None) -> Path | None:
    """Return a model's folder or GGUF file; None if the cache has not all of it."""
    for repo, revision, folder, files in _snapshots():
        if repo == name.repo and name.revision in revision:
            with suppress(ConfigError):
                return _chosen(name, files, say).path(folder)
    return None


def cached_models() -> list[CachedModel]:
    """Return all whole models of the cache, by name."""
    found = []
    for repo, revision, folder, files in _snapshots():
        at = repo if _MAIN in revision else f"{repo}@{min(revision, key=len)}"
        firsts = [None] if _has_weights(files) else _first_files(files)
        for file in firsts:
            name = HubName(at if file is None else f"{at}/{file}", repo, "", None, file)
            with suppress(ConfigError):
                choice = _chosen(name, files, lambda line: None)
                kind = "safetensors" if file is None else f"GGUF {_tag(file)}".rstrip()
                size = sum(files[part] for part in choice.names)
                found.append(CachedModel(name.text, kind, size, choice.path(folder)))
    return sorted(found)


def remove(path: Path) -> None:
    """Remove a model's files from the cache. path: as of `fetch`; others are left alone."""
    if any(parent.name == "snapshots" for parent in path.parents):
        for file in [*path.rglob("*")] if path.is_dir() else part_names(path):
            if file.is_file():
                file.resolve().unlink()
                file.unlink(missing_ok=True)


def _snapshots() -> Iterator[tuple[str, set[str], Path, dict[str, int]]]:
    """Yield repository, revisions (refs and commit), folder, and sizes of files by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repo in repos:
        for each in repo.revisions if repo.repo_type == "model" else ():
            folder = each.snapshot_path
            files = {f.file_path.relative_to(folder).as_posix(): f for f in each.files}
            sizes = {name: file.size_on_disk for name, file in files.items()}
            sizes.pop(_unverified(repo.repo_path / _MARK), None)
            yield repo.repo_id, {*each.refs, each.commit_hash}, folder, sizes


def _is_plain(file: str, size: object) -> bool:
    """Return whether a name of the network stays inside its folder, and its size is a number."""
    is_inside = file.isprintable() and not file.startswith("/") and ".." not in file
    return is_inside and (size is None or type(size) is int)


# --- which files --------------------------------------------------------------------------------


def _chosen(name: HubName, files: Collection[str], say: Say) -> _Choice:
    """Choose the files of a model among those of its repository. Raises ConfigError."""
    if name.quant is None and name.file is None and _has_weights(files):
        first = SINGLE_FILE if SINGLE_FILE in files else min(filter(_is_shard, files))
        beside = [f for f in files if _FOLDER_FILES.fullmatch(f) or f == INDEX_FILE]
        choice = _Choice([*beside, *_parts(first)], "config.json")
    else:
        main = name.file or _by_quant(name, _first_files(files), say)
        choice = _Choice(_parts(main), main)
    absent = next((file for file in (choice.main, *choice.names) if file not in files), None)
    if absent is not None:
        raise ConfigError(f"{name.text}: the repository has no file {absent}")
    return choice


def _has_weights(files: Collection[str]) -> bool:
    return SINGLE_FILE in files or any(map(_is_shard, files))


def _is_shard(file: str) -> bool:
    part = _PART.fullmatch(file)
    return part is not None and (part[1], part[4]) == ("model", ".safetensors")


def _parts(file: str) -> list[str]:
    return [path.as_posix() for path in part_names(Path(file))]


def _first_files(files: Collection[str]) -> list[str]:
    """Return GGUF files that are models, of split ones the first part."""
    ggufs = (f for f in files if f.endswith(".gguf") and not any(x in f for x in _NO_MODEL))
    ggufs = (f for f in ggufs if not Path(f).name.startswith("mtp-"))  # a head or an assistant
    return sorted(f for f in ggufs if (part := _PART.fullmatch(f)) is None or int(part[2]) == 1)


def _stem(file: str) -> str:
    part = _PART.fullmatch(file)
    return file.removesuffix(".gguf") if part is None else part[1]


def _tag(file: str) -> str:
    found = _TAG.fullmatch(_stem(file))
    return "" if found is None else found[1].upper()


def _by_quant(name: HubName, files: list[str], say: Say) -> str:
    """Return the GGUF file of a quantisation, or of the default one. Raises ConfigError."""
    if not files:
        raise ConfigError(
            f"{name.text}: the repository has no {'' if name.quant else 'safetensors or '}"
            "GGUF files"
        )
    if name.quant is None:
        best = min(files, key=_distance)
        files = [file for file in files if _tag(file) == _tag(best)]
        if len(files) == 1 and _tag(best) != _DEFAULT_QUANT:
            say(
                f"{name.text}: no {_DEFAULT_QUANT}, so {best} is taken: the nearest with "
                f"{_DEFAULT_BITS} bits or more, else with fewer"
            )
    else:
        ending = re.compile(rf"(?:.*[-._/])?{re.escape(name.quant)}", re.IGNORECASE)
        found = [file for file in files if ending.fullmatch(_stem(file))]
        if not found:
            tags = ", ".join(dict.fromkeys(_tag(f) or f for f in files))
            raise ConfigError(f"{name.text}: no file has {name.quant}; allowed: {tags}")
        files = found
    if len(files) > 1:
        raise ConfigError(
            f"{name.text}: several files fit; name one as {name.repo}/FILE: {', '.join(files)}"
        )
    return files[0]


def _distance(file: str) -> tuple[bool, int, bool, bool, bool, str]:
    """Return a key that sorts files by nearness to the default quantisation."""
    tag = _tag(file)
    digits = re.search(r"\d+", tag)
    bits = int(digits[0]) if digits else 1
    is_fewer = bits < _DEFAULT_BITS
    others = (not tag.endswith("_K_M"), "_K" not in tag, tag.startswith("I"), tag)
    return (is_fewer, abs(bits - _DEFAULT_BITS), *others)


# --- download -----------------------------------------------------------------------------------


def _downloaded(
    name: HubName,
    choice: _Choice,
    files: Mapping[str, Any],
    commit: str,
    say: Say,
    progress: Progress,
) -> Path:
    """Download missing files one by one, each verified before the next; return their folder."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
    mark, paths = folder / _MARK, {}
    for file in choice.names:
        paths[file] = try_to_load_from_cache(name.repo, file, revision=commit)
    paths.pop(_unverified(mark), None)
    missing = [file for file in choice.names if not isinstance(paths.get(file), str)]
    _require_space(name, sum(files[file].size or 0 for file in missing))
    for file in missing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(file)
            with _progress(name.text, file, files[file].size or 0, folder, say, progress):
                path = hf_hub_download(name.repo, file, revision=name.revision)
        except Exception as error:  # as in `fetch`
            raise ConfigError(_advice(name, error)) from error
        _verify(name, Path(path), files[file])
        mark.unlink(missing_ok=True)
    main = try_to_load_from_cache(name.repo, choice.main, revision=commit)
    if not isinstance(main, str):
        raise ConfigError(f"{name.text} was changed on the hub during the download; run it again")
    return Path(main).parents[choice.main.count("/")]


@contextmanager
def _progress(
    name: str, file: str, size: int, folder: Path, say: Say, progress: Progress
) -> Iterator[None]:
    """Say every tenth or 30 s how far a download is, unless a terminal shows its bar."""
    ended = threading.Event()

    def watch() -> None:
        told, told_at = 0, time.monotonic()
        while not ended.wait(_LOOK_S):
            with suppress(OSError):  # one that has just ended
                found = sum(part.stat().st_size for part in folder.glob("blobs/*.incomplete"))
                progress(file, min(found, size), size)
                is_late = time.monotonic() - told_at > _LINE_S
                if not sys.stderr.isatty() and (found - told >= max(size / 10, 1) or is_late):
                    say(f"{name}: {file}: {found / max(size, 1):.0%} of {size / 1e6:.0f} MB")
                    told, told_at = found, time.monotonic()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        progress(file, size, size)
    finally:
        ended.set()


def _unverified(mark: Path) -> str:
    """Return the file whose download or verification did not end; empty without one."""
    return mark.read_text() if mark.exists() else ""


def _require_space(name: HubName, num_bytes: int) -> None:
    """Raises ConfigError where the disk of the cache has too little space."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if num_bytes > free:
        raise ConfigError(
            f"{name.text} takes {num_bytes / 1e9:.1f} GB, and the disk of {folder} has "
            f"{free / 1e9:.1f} GB: free {(num_bytes - free) / 1e9:.1f} GB, or set HF_HOME"
        )


def _verify(name: HubName, path: Path, file: Any) -> None:
    """Remove a downloaded file whose size or SHA-256 is not the hub's. Raises ConfigError."""
    wanted = None if file.lfs is None else file.lfs.sha256
    is_right = file.size in (None, path.stat().st_size)
    if is_right and wanted is not None:
        with path.open("rb") as content:
            is_right = hashlib.file_digest(content, "sha256").hexdigest() == wanted
    if not is_right:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"{name.text}: {file.rfilename} arrived damaged (its size or SHA-256 is not the hub's) "
            "and was removed; try again"
        )


# --- what to do about an error -----------------------------------------------------------------


def _advice(name: HubName, error: BaseException) -> str:
    """Return one line on a failed look-up or download that says what to do."""
    from huggingface_hub import constants, get_token

    model, hub, kinds = name.text, constants.ENDPOINT, _kinds(error)
    gated = f"{model} is gated or private, or does not exist: accept its terms at {hub}/{name.repo}"
    if get_token() is None:
        gated += ", then run `hf auth login` or set HF_TOKEN"
    else:
        gated += " with the account of the token that you use; that may also be out of date"
    if _OFFLINE in kinds:
        return (
            f"{model} is not in the cache, and HF_HUB_OFFLINE is set: unset it, or run "
            f"`penstock pull {model}` first"
        )
    if any(getattr(each, "errno", None) == errno.ENOSPC for each in _chain(error)):
        return f"{model}: the disk of {constants.HF_HUB_CACHE} is full: free some, or set HF_HOME"
    if "RevisionNotFoundError" in kinds:
        return f"{model}: the repository has no revision {name.revision}"
    by_status = {
        401: gated,
        403: gated,
        404: f"{model} is neither a file or folder here nor a model of {hub}: check its name",
        429: f"{model}: {hub} allows no more requests now: wait, or log in",
    }
    other = f"{model} cannot be downloaded ({_short(error)}): run it again, whole files are kept"
    return by_status.get(_status(error), other)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def _kinds(error: BaseException) -> set[str]:
    return {type(each).__name__ for each in _chain(error)}


def _status(error: BaseException) -> int:
    """Return the HTTP status of an answer; 0 without one."""
    answers = (getattr(each, "response", None) for each in _chain(error))
    return next((a.status_code for a in answers if a is not None), 0)


def _short(error: BaseException) -> str:
    """Return the hub and its status, or the last cause without unprintable characters of it."""
    from huggingface_hub import constants

    *_, last = _chain(error)
    text = " ".join(str(last).split())[:160]
    told = "".join(filter(str.isprintable, text)) or type(last).__name__
    return f"{constants.ENDPOINT}: {f'HTTP status {_status(error)}' if _status(error) else told}"
