"""What pyproject.toml cannot say: how editable installs are found, and the description for package indexes."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
LINKS = {".editable/slicedkv": "../slicedkv", "slicedkv/triton_kernels": "../triton_kernels"}


class EditableWheel(editable_wheel):
    """Puts a folder on the path in which `slicedkv`, as a link, is the only package.

    With the checkout's root there, `triton_kernels` would hide another package of that name; with the import hooks that
    are the default, type checkers would find nothing.
    """

    def finalize_options(self) -> None:
        for name, target in LINKS.items():
            link = ROOT / name
            link.parent.mkdir(exist_ok=True)
            if not link.exists():  # an archive of the source has none
                link.unlink(missing_ok=True)  # one that leads nowhere
                link.symlink_to(target, target_is_directory=True)
        self.distribution.package_dir = {"": ".editable"}
        super().finalize_options()


def description() -> str:
    """README.md; links into the source, which lead nowhere from a package index, become plain text."""
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)[^)]*\)", r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    cmdclass={"editable_wheel": EditableWheel},
)
