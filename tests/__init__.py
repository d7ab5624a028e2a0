"""The tests; a package, so that `tests.support` is this folder's and files of one name may be in two subfolders."""
