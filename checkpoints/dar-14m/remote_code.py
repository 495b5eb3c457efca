"""Self-contained checkpoints: a saved folder carries the source files its model needs, for `trust_remote_code=True`.

transformers can copy such files itself (`register_for_auto_class`), but looks for every relative import in the file's
own folder, so that a package with several folders comes out broken. Here the configuration does it: every way of
saving a model (`save_pretrained`, `push_to_hub`, a Trainer's checkpoints) calls `config.save_pretrained`, on the rank
that saves and before anything is uploaded. The files lie flat beside `config.json`, so a relative import is rewritten
to name a neighbour whatever folder it named before; all else stays as it is, byte for byte.
"""

import ast
import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

# Where the file of an entry class may lie, as seen from the folder of the configuration's file.
ENTRY_FOLDERS = (".", "../modeling")

_NEWLINE = re.compile(r"\r\n|\r|\n")  # what ends a line of Python; `str.splitlines` knows more
# A line that begins with a relative import, which may go on over further lines in parentheses.
_RELATIVE_IMPORT = re.compile(r"(?P<indent>[ \t\f]*)from\s+(?P<module>\.[^\\]*?)\s+import\b")
# How transformers finds the neighbours of a file (`dynamic_module_utils.get_relative_imports`).
_SEEN_IMPORT = re.compile(r"^\s*(?:import\s+\.(\S+)\s*$|from\s+\.(\S+)\s+import)", re.MULTILINE)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as _Base
else:
    _Base = object  # a base that is a dataclass would put PreTrainedConfig's defaults before those of GPTNeoXConfig


class RemoteCodeConfig(_Base):
    """Goes before a configuration class, as in `class XConfig(RemoteCodeConfig, GPTNeoXConfig)`.

    Saving an `XConfig`, or a model that has one, also writes the source files of `remote_classes` with all that they
    import relatively, and names these classes in `config.json`. A class from a checkpoint's own files, which lie flat
    already, leaves the copying to transformers.

    Attributes:
        remote_classes: auto class -> `"file.Class"`, for instance `"AutoModel": "modeling_x.XModel"`. The file lies in
            the folder of the configuration's file or in the folder `modeling` beside that. Empty: nothing is added.
        adapter_targets: names of the modules that peft's LoRA adapts where its configuration names none. peft looks
            them up in a table by `model_type`, which knows transformers' own models.
    """

    remote_classes: ClassVar[Mapping[str, str]] = {}
    adapter_targets: ClassVar[Sequence[str]] = ()

    def __post_init__(self, **kwargs: Any) -> None:
        if not _loaded_from_checkpoint(type(self)):
            # It says where a checkpoint's classes are, not how the model is made. Kept, it would stay behind in what
            # is made from this configuration's values, and name files that are not there.
            kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in `PreTrainedConfig`."""
        # peft reads a model's configuration by this method right before it looks `model_type` up: the one moment at
        # which peft is known to be loaded, whatever was imported first. Its import takes seconds, so nobody else does.
        peft = sys.modules.get("peft.utils.constants")
        if peft is not None and self.adapter_targets:
            known = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            known.setdefault(self.model_type, list(self.adapter_targets))
        return super().to_dict()

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write `config.json` and the source files; arguments as in `PreTrainedConfig.save_pretrained`.

        Raises:
            ValueError: an entry of `remote_classes` does not exist, or a file cannot travel; see `collect_sources`.
        """
        # With a file in the folder's place, transformers' own error is the one to see.
        if not self._writes_sources() or os.path.isfile(save_directory):
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
            return
        sources = self._collect_sources()
        os.makedirs(save_directory, exist_ok=True)
        for name, content in sources.items():
            _replace(Path(save_directory, name), content)

        own = self.__dict__.get("auto_map")
        self.auto_map = {**(own or {}), **self.remote_classes}
        try:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        finally:
            if own is None:
                del self.auto_map
            else:
                self.auto_map = own

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        """As in `PushToHubMixin`, the source files included: they are written before it looks what is new."""
        if self._writes_sources():
            written = self._collect_sources()
            files_timestamps = {name: time for name, time in files_timestamps.items() if name not in written}
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)

    def _writes_sources(self) -> bool:
        return bool(self.remote_classes) and not _loaded_from_checkpoint(type(self))

    def _collect_sources(self) -> dict[str, bytes]:
        owner = _owner(type(self))
        file = getattr(sys.modules.get(owner.__module__), "__file__", None)
        if file is None:
            raise ValueError(
                f"{owner.__name__} is defined in {owner.__module__!r}, which has no source file to save with the "
                "model: define it in a file, or set its remote_classes to {}."
            )
        package, dot, _ = owner.__module__.partition(".")
        return collect_sources(self.remote_classes, Path(file).parent, package if dot else None)


def _owner(config_class: type) -> type:
    """The class whose `remote_classes` a configuration class has; a subclass of it adds no files."""
    return next(cls for cls in config_class.__mro__ if "remote_classes" in vars(cls))


def _loaded_from_checkpoint(config_class: type) -> bool:
    return _owner(config_class).__module__.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


# ---------------------------------------------------------------------------------------------------------------------
# From a package with folders to flat files
# ---------------------------------------------------------------------------------------------------------------------


def collect_sources(classes: Mapping[str, str], folder: Path, package: str | None = None) -> dict[str, bytes]:
    """The files that define `classes` and every file they import relatively, directly or not, as flat neighbours.

    Args:
        classes: auto class -> `"file.Class"`.
        folder: where the files are looked for; see `ENTRY_FOLDERS`.
        package: a top-level package that none of the files may import by its name; `None` allows everything.

    Returns:
        File name -> content, sorted by name.

    Raises:
        ValueError: a class or an imported file does not exist; two files have the same name; an import that cannot be
            rewritten or that transformers would not see; a source that is not valid UTF-8 or Python.
    """
    entries: dict[Path, list[str]] = {}
    for auto_class, reference in classes.items():
        stem, _, class_name = reference.partition(".")
        if not (stem.isidentifier() and class_name.isidentifier()):
            raise ValueError(f"remote_classes[{auto_class!r}] must look like 'file.Class', got {reference!r}.")
        candidates = [_join(folder, *place.split("/"), f"{stem}.py") for place in ENTRY_FOLDERS]
        file = next((path for path in candidates if path.is_file()), None)
        if file is None:
            places = " or ".join(str(path) for path in candidates)
            raise ValueError(f"remote_classes[{auto_class!r}] is {reference!r}, but there is no {places}.")
        entries.setdefault(file, []).append(class_name)

    sources: dict[str, bytes] = {}
    origins: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        file = waiting.pop()
        known = origins.setdefault(file.name, file)
        if known != file:
            raise ValueError(
                f"{known} and {file} would both be saved as {file.name}: files that travel need different names."
            )
        if file.name in sources:
            continue
        tree, text, imported = _flatten(file, package)
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for class_name in entries.get(file, ()):
            if class_name not in defined:
                raise ValueError(f"remote_classes names the class {class_name!r}, which {file} does not define.")
        sources[file.name] = text.encode("utf-8")
        waiting += imported
    return dict(sorted(sources.items()))


def _flatten(file: Path, package: str | None) -> tuple[ast.Module, str, list[Path]]:
    """One file's tree, its text with flat relative imports, and the files that these import."""
    try:
        text = file.read_bytes().decode("utf-8")  # not read_text, which would change the ends of lines
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError) as error:
        raise ValueError(f"{file} cannot be saved with a model, not being plain UTF-8 Python: {error}") from error

    starts = [0, *(match.end() for match in _NEWLINE.finditer(text))]
    changes: list[tuple[int, int, str]] = []
    imported: list[Path] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if package is not None and package in _absolute_imports(node):
            raise ValueError(
                f"{file}, line {node.lineno}: a file that travels must run where {package} is not installed; "
                "import relatively."
            )
        if isinstance(node, ast.Import) or not node.level:
            continue
        if node.module is None:
            raise ValueError(
                f"{file}, line {node.lineno}: transformers does not collect what `from . import x` imports; write "
                "`from .x import …`."
            )
        *parents, stem = node.module.split(".")
        target = _join(file.parent, *[".."] * (node.level - 1), *parents, f"{stem}.py")
        if not target.is_file():
            raise ValueError(f"{file}, line {node.lineno}: imports from {target}, which is not a file.")
        imported.append(target)
        clause = _RELATIVE_IMPORT.match(text, starts[node.lineno - 1])
        if clause is None or len(clause["indent"]) != node.col_offset:
            raise ValueError(
                f"{file}, line {node.lineno}: transformers sees a relative import only where a line begins with it, "
                "with no backslash before the names."
            )
        changes.append((*clause.span("module"), f".{stem}"))

    for start, end, module in sorted(changes, reverse=True):  # from the end, so that earlier places stay right
        text = text[:start] + module + text[end:]
    seen = {name or other for name, other in _SEEN_IMPORT.findall(_NEWLINE.sub("\n", text))}
    if extra := seen - {target.stem for target in imported}:
        raise ValueError(
            f"{file}: transformers would look for {sorted(extra)}, because a line of a text looks like a relative "
            "import; break that line elsewhere."
        )
    return tree, text, imported


def _absolute_imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The top-level packages that a statement imports by name."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [] if node.level or node.module is None else [node.module.partition(".")[0]]


def _join(folder: Path, *parts: str) -> Path:
    """A path without `..`, which links on the way do not change: a package's folders are found by their names."""
    return Path(os.path.normpath(folder.joinpath(*parts)))


def _replace(path: Path, content: bytes) -> None:
    """Write beside, then rename, so that nobody ever sees half of a file."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
