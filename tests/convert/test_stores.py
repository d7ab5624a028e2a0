"""Import a public model into a workdir in an object store, and export it."""

import pytest

from seqjax.convert.__main__ import to_directory, to_workdir
from seqjax.errors import UserError
from seqjax.training.evaluate import restore
from tests import support
from tests.convert.cases import GOLDEN


def test_import_into_a_store_equals_local_import(server, tmp_path):
    url = f"{server.url}/llama"
    to_workdir(GOLDEN / "llama", None, tmp_path / "local")
    to_workdir(GOLDEN / "llama", None, url)
    (config, _, params, step, _), (remote_config, _, remote_params, _, _) = restore(tmp_path / "local"), restore(url)
    assert (remote_config, step) == (config, 0)
    assert support.digest(remote_params) == support.digest(params)
    with pytest.raises(UserError, match=f"{url} .*--workdir"):
        to_workdir(GOLDEN / "llama", None, url)
    to_directory(url, tmp_path / "out", "float32", with_tokenizer=False)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="--out=s3://bucket/out"):
        to_directory(url, "s3://bucket/out", "float32")
