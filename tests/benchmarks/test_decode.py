"""Test benchmarks.decode in a small run."""

import jax
import jax.numpy as jnp

from benchmarks import decode


def test_small_run_measures_each_case(tmp_path, capsys) -> None:
    n = decode.Sizes(2, 64, 2, 8, 16, spare=5, dtype="float32")
    rows = decode.run(n, 1, repeats=1, seconds=0)
    assert not [row for row in rows if "error" in row]
    assert rows[0]["bytes"] == 2 * 59 * 2 * 2 * 8 * 4
    assert {row["case"] for row in rows} == {"attention", *decode.CASES}
    assert "chunk-approx xla" in capsys.readouterr().out
    settings = n._asdict() | {"layers": 1}
    decode.plot_report(
        {"machine": {"device": "a test"}, "settings": settings, "results": rows}, tmp_path / "decode.png"
    )
    assert (tmp_path / "decode.png").stat().st_size > 1000


def test_decoding_implementations_agree() -> None:
    n = decode.Sizes(2, 64, 2, 8, 16, spare=5, dtype="float32")
    operands = decode.layer_operands(n, jax.random.key(0))
    outs = [decode.function("attention", name, n)(*operands, jnp.asarray(n.length)) for name in ("step", "jax.nn")]
    assert abs(outs[0] - outs[1]).max() < 1e-5
