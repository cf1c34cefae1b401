"""Models by their name on a hub: which files are taken, and what is said where that fails."""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.hub import Hub, commit_of, hub

from penstock.config import ConfigError, model_name
from penstock.engine.models.hub import HubName, cached, cached_models, fetch
from penstock.zoo.registry import model_path

__all__ = ["hub"]

NAME = "owner/name"
TINY = model_path("draft-tiny")


def parsed(text: str) -> HubName:
    name = HubName.parse(text)
    assert name is not None
    return name


def get(text: str) -> tuple[Path, list[str]]:
    """Path, and lines for the user."""
    said: list[str] = []
    return fetch(parsed(text), said.append), said


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        get(text)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def ggufs(hub: Hub) -> Callable[..., None]:
    def add(*names: str) -> None:
        hub.add(NAME, {"README.md": b"", **{name: name.encode() for name in names}})

    return add


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", ("main", None, None)),
        ("owner/name@v1.0", ("v1.0", None, None)),
        ("owner/name@refs/pr/3", ("refs/pr/3", None, None)),
        ("owner/name:Q4_K_M", ("main", "Q4_K_M", None)),
        ("owner/name@v1:UD-Q4_K_XL", ("v1", "UD-Q4_K_XL", None)),
        ("owner/name/sub/file.gguf", ("main", None, "sub/file.gguf")),
        ("owner/name@v1/file.gguf", ("v1", None, "file.gguf")),
    ],
)
def test_names(text: str, parts: tuple[str, str | None, str | None]) -> None:
    name = parsed(text)
    assert (name.revision, name.quant, name.file) == parts
    assert text.startswith(name.repo)


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/owner/name",
        "./owner/name",
        "../name",
        "models/file.gguf",
        "a/b/c",
        "a b/c",
        "a/b:",
    ],
)
def test_texts_that_are_no_names(text: str) -> None:
    assert HubName.parse(text) is None


def test_a_folder_has_the_files_that_are_needed(hub: Hub) -> None:
    junk = ("pytorch_model.bin", "model.onnx", "original/consolidated.safetensors", "x.msgpack")
    own = {f.name: f.read_bytes() for f in TINY.iterdir()}
    hub.add(NAME, own | {name: b"0" for name in junk})
    path, said = get(NAME)
    assert {f.name for f in path.iterdir()} == set(own)
    assert all((path / name).read_bytes() == content for name, content in own.items())
    assert (model_name(path), said) == (NAME, [])
    hub.asked.clear()
    assert get(NAME)[0] == path
    assert hub.asked == []
    (model,) = cached_models()
    assert (model.name, model.format, model.path) == (NAME, "safetensors", path)


def test_an_embedding_models_folder_has_its_pooling(hub: Hub) -> None:
    own = ("config.json", "model.safetensors", "modules.json", "1_Pooling/config.json")
    hub.add(NAME, dict.fromkeys((*own, "2_Dense/model.safetensors"), b"0"))
    path, _ = get(NAME)
    found = {f.relative_to(path).as_posix() for f in path.rglob("*") if f.is_file()}
    assert found == set(own)


def test_shards_with_their_index(hub: Hub) -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    files = {name: name.encode() for name in ("config.json", "model.safetensors.index.json")}
    hub.add(NAME, files | {name: name.encode() for name in shards})
    assert {f.name for f in get(NAME)[0].iterdir()} == {*files, *shards}
    hub.add("owner/part", files | {shards[1]: b""})
    assert "the repository has no file model-00001-of-00002.safetensors" in refusal("owner/part")


def test_a_revision(hub: Hub) -> None:
    hub.add(NAME, {"config.json": b"main", "model.safetensors": b"1"})
    hub.add(NAME, {"config.json": b"old", "model.safetensors": b"1", "vocab.json": b""}, "v1")
    assert (get(f"{NAME}@v1")[0] / "config.json").read_bytes() == b"old"
    assert cached(parsed(NAME)) is None
    commit = commit_of(NAME, "v1", hub.repos[NAME]["v1"])
    assert get(f"{NAME}@{commit}")[0] == cached(parsed(f"{NAME}@v1"))
    assert refusal(f"{NAME}@v2") == f"{NAME}@v2: the repository has no revision v2"


def test_gguf_files_by_quant_and_by_name(hub: Hub, ggufs: Callable[..., None]) -> None:
    ggufs("name-Q8_0.gguf", "name-IQ4_XS.gguf", "name-UD-Q4_K_XL.gguf", "mmproj-F16.gguf")
    for text in (":Q8_0", ":q8_0", "/name-Q8_0.gguf"):
        assert get(NAME + text)[0].name == "name-Q8_0.gguf"
    assert get(f"{NAME}:UD-Q4_K_XL")[0].name == "name-UD-Q4_K_XL.gguf"
    assert hub.downloads() == ["name-Q8_0.gguf", "name-UD-Q4_K_XL.gguf"]
    told = refusal(f"{NAME}:Q4_0")
    assert told == f"{NAME}:Q4_0: no file has Q4_0; allowed: IQ4_XS, Q8_0, Q4_K_XL"
    assert "the repository has no file x.gguf" in refusal(f"{NAME}/x.gguf")
    assert [m.name for m in cached_models()] == [
        f"{NAME}/name-{x}.gguf" for x in ("Q8_0", "UD-Q4_K_XL")
    ]
    assert {m.format for m in cached_models()} == {"GGUF Q4_K_XL", "GGUF Q8_0"}


@pytest.mark.parametrize(
    ("tags", "taken"),
    [
        (["Q8_0", "Q4_K_M", "Q4_0", "BF16"], "Q4_K_M"),
        (["Q4_0", "Q4_K_S", "IQ4_NL", "Q5_K_M"], "Q4_K_S"),
        (["Q3_K_M", "Q2_K", "Q5_K_S", "Q5_K_M"], "Q5_K_M"),
        (["BF16", "Q8_0", "F32"], "Q8_0"),
        (["IQ2_XXS", "Q3_K_L"], "Q3_K_L"),
        (["MXFP4"], "MXFP4"),
    ],
)
def test_the_default_quant(ggufs: Callable[..., None], tags: list[str], taken: str) -> None:
    ggufs(*(f"name.{tag}.gguf" for tag in tags))
    path, said = get(NAME)
    assert path.name == f"name.{taken}.gguf"
    assert len(said) == (taken != "Q4_K_M")
    assert all(f"no Q4_K_M, so {path.name} is taken: the nearest with 4 bits" in x for x in said)


def test_several_models_in_a_repository(ggufs: Callable[..., None]) -> None:
    ggufs("a-Q4_K_M.gguf", "b-Q4_K_M.gguf")
    for text in (NAME, f"{NAME}:Q4_K_M"):
        assert "name one as owner/name/FILE: a-Q4_K_M.gguf, b-Q4_K_M.gguf" in refusal(text)
    ggufs("README.gguf.txt")
    assert "has no safetensors or GGUF files" in refusal(NAME)


def test_a_split_file(hub: Hub, ggufs: Callable[..., None]) -> None:
    parts = [f"Q8_0/name-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    ggufs(*parts, "name-Q4_K_M.gguf")
    path, _ = get(f"{NAME}:Q8_0")
    assert path.parts[-2:] == ("Q8_0", "name-Q8_0-00001-of-00003.gguf")
    assert {f.name for f in path.parent.iterdir()} == {Path(part).name for part in parts}
    assert cached(parsed(f"{NAME}:Q8_0")) == path
    (path.parent / Path(parts[2]).name).unlink()
    assert cached(parsed(f"{NAME}:Q8_0")) is None
    ggufs(*parts[:2])
    assert f"the repository has no file {parts[2]}" in refusal(f"{NAME}:Q8_0")


def test_a_gated_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    hub.gated.add(NAME)
    said = f"is gated or private, or does not exist: accept its terms at {hub.url}/{NAME}, then"
    assert said in refusal(NAME)
    assert cached_models() == []
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    told = refusal(NAME)
    assert f"accept its terms at {hub.url}/{NAME} with the account of the token that you" in told
    assert "set HF_TOKEN" not in told
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert get(NAME)[0].is_dir()


def test_a_missing_model_and_a_busy_hub(hub: Hub) -> None:
    told = f"is neither a file or folder here nor a model of {hub.url}: check its name"
    assert told in refusal("owner/nothing")
    hub.busy = True
    assert f"{hub.url} allows no more requests now: wait, or log in" in refusal(NAME)


def test_a_cut_download_goes_on_where_it_was(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.add(NAME, TINY)
    hub.cuts["model.safetensors"] = [100_000]
    path, _ = get(NAME)
    whole = (TINY / "model.safetensors").read_bytes()
    assert (path / "model.safetensors").read_bytes() == whole
    ranges = [told for method, file, told in hub.asked if file == "model.safetensors"]
    start = int(str(ranges[-1]).removeprefix("bytes=").removesuffix("-"))
    assert ranges == [None, None, f"bytes={start}-"]
    assert 0 < start <= 100_000


def test_a_download_into_a_log(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each tenth, or from time to time; none where a terminal shows a bar."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    monkeypatch.setattr("penstock.engine.models.hub._LOOK_S", 0.002)
    hub.add(NAME, TINY)
    hub.pace_s = 0.01
    _, said = get(NAME)
    assert 5 <= len(said) <= 20
    assert all(re.fullmatch(rf"{NAME}: [a-z_.]+: \d+% of [01] MB", line) for line in said)
    monkeypatch.setattr("penstock.engine.models.hub._LINE_S", 0.005)
    for is_terminal in (False, True):
        shutil.rmtree(constants.HF_HUB_CACHE)
        monkeypatch.setattr("sys.stderr.isatty", lambda told=is_terminal: told)
        assert (len(get(NAME)[1]) > 9) == (not is_terminal)


def test_a_download_that_stays_cut_is_not_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add(NAME, TINY)
    hub.cuts["model.safetensors"] = [0] * 6
    assert "run it again, whole files are kept" in refusal(NAME)
    assert cached(parsed(NAME)) is None
    assert cached_models() == []
    hub.asked.clear()
    path, _ = get(NAME)
    assert hub.downloads() == ["model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()


def test_a_wrong_checksum(hub: Hub, ggufs: Callable[..., None]) -> None:
    ggufs("name-Q8_0.gguf")
    hub.wrong.add("name-Q8_0.gguf")
    told = "name-Q8_0.gguf arrived damaged (its size or SHA-256 is not the hub's) and was removed"
    assert told in refusal(f"{NAME}:Q8_0")
    assert cached(parsed(f"{NAME}:Q8_0")) is None
    hub.wrong.clear()
    assert get(f"{NAME}:Q8_0")[0].read_bytes() == b"name-Q8_0.gguf"


def test_a_file_that_was_not_verified_is_verified_by_the_next_call(hub, ggufs, monkeypatch) -> None:
    ggufs("name-Q8_0.gguf")
    hub.wrong.add("name-Q8_0.gguf")
    with monkeypatch.context() as killed:
        killed.setattr("penstock.engine.models.hub._verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get(f"{NAME}:Q8_0")
    assert cached(parsed(f"{NAME}:Q8_0")) is None
    assert cached_models() == []
    assert "arrived damaged" in refusal(f"{NAME}:Q8_0")
    hub.wrong.clear()
    path, _ = get(f"{NAME}:Q8_0")
    assert cached(parsed(f"{NAME}:Q8_0")) == path


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    path, _ = get(NAME)
    hub.busy = True
    assert get(NAME) == (path, [f"{NAME}: the cached copy is used ({hub.url}: HTTP status 429)"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(NAME) == (path, [])
    told = "is not in the cache, and HF_HUB_OFFLINE is set: unset it, or run `penstock pull"
    assert told in refusal("owner/other")
    (path / "model.safetensors").unlink()
    assert told in refusal(NAME)


def test_a_hub_that_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    told = "owner/name cannot be downloaded (http://127.0.0.1:9: [Errno 111] Connection refused): "
    assert told in refusal(NAME)


def test_a_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    usage = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        told = refusal(NAME)
    assert told.startswith(f"{NAME} takes 0.0 GB, and the disk of {constants.HF_HUB_CACHE} has")
    assert hub.asked == []

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", full)
        assert f"{NAME}: the disk of {constants.HF_HUB_CACHE} is full" in refusal(NAME)
    assert cached(parsed(NAME)) is None
    assert get(NAME)[0].is_dir()


def test_names_of_files_that_leave_the_folder_are_not_taken(hub: Hub) -> None:
    hub.add(NAME, {"../../a-Q4_K_M.gguf": b"1", "/tmp/b-Q4_K_M.gguf": b"1", "\x1b-Q4_0.gguf": b""})
    assert "has no safetensors or GGUF files" in refusal(NAME)
