"""The evaluation suite: suite.sh trains and evaluates, lab.suite reports."""
