"""The essays that come with the package, as texts of commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nearfar.cli_messages import UserError

# The demo's text is the first of these; the others, then all that remain, follow if one is not long enough. The
# prototypes that come with the package were fitted on other essays.
DEMO_ESSAYS = ("worked.txt", "popular.txt", "philosophy.txt", "startuplessons.txt")

# Essays, without ".txt", on which policies are measured: nothing is fitted or trained on them.
HELD_OUT_ESSAYS = (
    "worked", "popular", "philosophy", "startuplessons", "langdes", "useful", "desres", "boss", "submarine", "apple",
    "gba", "hubs",
)  # fmt: skip


def packaged_text(tokens: int, leave_out: Sequence[str] = ()) -> str:
    """Packaged essays, as many as give `tokens` tokens for sure, one after the other; none of those to leave out."""
    from nearfar.conversion.packaged_model import PackagedModelError, packaged_essays_dir
    from nearfar.evaluation.texts import join_texts, load_texts

    try:
        folder = packaged_essays_dir()
    except PackagedModelError as error:
        raise UserError(f"{error} (or give a text of your own with --text)") from error
    essays = {text.name: text for text in load_texts([folder]) if Path(text.name).stem not in leave_out}
    order = [name for name in DEMO_ESSAYS if name in essays] + [name for name in essays if name not in DEMO_ESSAYS]
    chosen, characters = [], 0
    for name in order:
        chosen.append(essays[name])
        characters += len(essays[name].text)
        if characters > 10 * tokens:  # English has four or five characters a token
            break
    return join_texts(chosen)
