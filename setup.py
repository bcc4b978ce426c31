"""The long description of the package: README.md for a reader without the repository.

Links and images that need its files are left out.
"""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8").partition("\n## Read on")[0]
text = re.sub(r"^!\[[^]]*\]\((?!https:).*\)\n+", "", readme, flags=re.MULTILINE)
text = re.sub(r"\[([^]]*)\]\((?!https:)[^)]*\)", r"\1", text)
text = text.replace("pip install .    # in the folder of this file", "pip install hmmlm").replace("'.[", "'hmmlm[")
setup(long_description=text, long_description_content_type="text/markdown")
