"""Tests of the plugin under axolotl, which `make test-axolotl` installs. Without axolotl they are not collected."""

import os
from importlib.metadata import PackageNotFoundError, version

try:
    version("axolotl")
except PackageNotFoundError:
    collect_ignore = ["test_plugin.py"]
else:
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # axolotl reads it when it is imported
    os.environ["ACCELERATE_USE_CPU"] = "true"
