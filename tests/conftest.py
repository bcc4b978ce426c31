"""Says at the head of a test run what it does not cover."""

from importlib.util import find_spec


def pytest_report_header() -> str:
    if find_spec("triton"):
        return "triton kernels: in the interpreter"
    return "triton kernels: NOT COVERED, triton is not installed"
