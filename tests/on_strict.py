"""The suite, or what is named, on the strict stand-in for CuPy: `python tests/on_strict.py [pytest's arguments]`."""

import os
import sys

from launch import ROOT, STRICT

os.chdir(ROOT)
patient = {"MINIZERO_TEST_PATIENCE": os.environ.get("MINIZERO_TEST_PATIENCE", "3")}  # it is some three times as slow
os.execve(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]], {**os.environ, **STRICT, **patient})
