"""The evaluation suite: suite.sh trains and evaluates several runs, `python -m lab.suite` writes the page."""
