"""The evaluation suite of several runs: suite.sh trains and evaluates them, `python -m lab.suite` writes the page."""
