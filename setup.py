"""Set the metadata that depends on the public address of the sources; pyproject.toml has the rest.

A package index has no files beside the README, so relative links break there. If SOURCE_URL is the address of the
repository, a build writes absolute links to the files of the version's tag. Without it the links stay relative.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import setup

SOURCE = os.environ.get("SOURCE_URL", "").rstrip("/")
README = Path("README.md").read_text(encoding="utf-8")

if SOURCE:
    tag = "v" + runpy.run_path("llama/host/version.py")["__version__"]
    relative = r"\]\((?!https?:|#)"
    README = re.sub(rf"(!\[[^]]*){relative}", rf"\1]({SOURCE}/raw/{tag}/", README)  # an image, not its page
    README = re.sub(relative, f"]({SOURCE}/blob/{tag}/", README)

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    project_urls={"Source": SOURCE} if SOURCE else {},
)
