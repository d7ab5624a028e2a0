"""A public model as a workdir in a store, and back."""

import pytest

from seqjax.convert.__main__ import to_directory, to_workdir
from seqjax.errors import UserError
from seqjax.training.evaluate import restore
from tests import support
from tests.convert.cases import GOLDEN


def test_a_public_model_in_a_store(server, tmp_path):
    url = f"{server.url}/llama"
    to_workdir(GOLDEN / "llama", None, tmp_path / "here")
    to_workdir(GOLDEN / "llama", None, url)
    (config, _, here, step, _), (stored, _, there, _, _) = restore(tmp_path / "here"), restore(url)
    assert (stored, step) == (config, 0)
    assert support.digest(there) == support.digest(here)
    with pytest.raises(UserError, match=f"{url} holds a run; import into a --workdir of its own"):
        to_workdir(GOLDEN / "llama", None, url)
    to_directory(url, tmp_path / "out", "float32", with_tokenizer=False)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="--out=s3://bucket/out: this is written to a path of this machine"):
        to_directory(url, "s3://bucket/out", "float32")
