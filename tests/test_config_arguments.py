"""What follows a config's name on the command line: settings in words, and what a wrong one is told."""

import ast
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqjax.commands import train
from seqjax.config import Config, from_config_dict, presets, to_dict
from seqjax.errors import UserError
from tests.test_configs import get, load


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("model.mixer.selection=approx", "model.mixer.selection", "approx"),
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("train.steps=7", "train.steps", 7),
        ("mesh.fsdp=-1,mesh.data=1", "mesh.fsdp", -1),
        ("log.tensorboard=False", "log.tensorboard", False),
        ("data.path=gs://bucket/a b", "data.path", "gs://bucket/a b"),
        ("data.train_domains=['prose']", "data.train_domains", ("prose",)),
        ("data.train_domains=prose", "data.train_domains", ("prose",)),
        ("data.train_domains=(prose, 2020,None)", "data.train_domains", ("prose", "2020", "None")),
        ("data.train_domains=", "data.train_domains", ()),
        ("model.mixer.implementation=xla", "model.mixer.implementation", "xla"),
        ("model.mixer.implementation=None", "model.mixer.implementation", None),
        (" train.seed=3 ,, mixed ", "train.seed", 3),
        ("model.mixer.kv_heads=1", "model.mixer.kv_heads", 1),
        ("model.mixer.kv_heads=1,model.mixer.kv_heads=None", "model.mixer.kv_heads", None),
        ("model.mixer.position=none", "model.mixer.position", "none"),
        ("optim.clip_norm=none", "optim.clip_norm", None),
        ("data.path=2048", "data.path", "2048"),
        ("model.mixer.name=transformer_pp", "model.mixer.window", None),
        ("model.mixer.window=5,model.mixer.name=transformer_pp", "model.mixer.window", 5),
        ("model.mixer={'name':'mamba1'}", "model.mixer.state", 16),
        ("model.mixer=({'name':'mamba1'},{'name':'transformer_pp','window':7})", "model.mixer.1.heads", 2),
        ("model.mixer=[{'name':'mamba1'},{'name':'mamba2'}],model.mixer[1].head_dim=32", "model.mixer.1.head_dim", 32),
    ],
)
def test_overrides(text, path, value):
    node = load("top1_chunk", f"debug,{text}")
    for part in path.split("."):
        node = node[int(part)] if isinstance(node, tuple) else getattr(node, part)
    assert node == value
    assert type(node) is type(value)


SOFTMAX = "model.mixer.name=transformer_pp"


@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("huge", ["'huge'", "110m", "demo"]),
        ("debgu", ["'debgu'", "Did you mean 'debug'"]),
        ("limted", ["Did you mean 'limited'"]),
        ("trian.steps=3", ["no group 'trian'", "Did you mean 'train'"]),
        ("train.step=3", ["no setting 'step'", "Did you mean 'steps'"]),
        ("train.steps.x=3", ["no group 'steps'"]),
        ("train.steps=many", ["config.train.steps must be int", "'many'"]),
        ("train.steps=2.5", ["config.train.steps must be int", "2.5"]),
        ("train.steps=True", ["config.train.steps must be int"]),
        ("train.steps=0", ["config.train.steps must be at least 1"]),
        ("size=/dev/null", ["config.size='/dev/null' labels the run", "without slashes"]),
        ("size=", ["config.size='' labels the run"]),
        ("name=..\\x", ["config.name=", "without slashes"]),
        ("name=a\tb", ["config.name='a\\tb'"]),
        ("train=3", ["config.train must be a group"]),
        ("optim.lr=fast", ["config.optim.lr must be float"]),
        ("data.weights=3", ["config.data.weights must be a list", "(3,)"]),
        ("data.train_domains={}", ["config.data.train_domains must be a list, not {}", "write ()"]),
        ("data.train_domains={'c4':1}", ["config.data.train_domains must be a list", "write ('c4',)"]),
        ("data.weights=(1,2)", ["config.data.weights has 2 values for 0"]),
        ("data.regime=mxied", ["config.data.regime", "Did you mean 'mixed'"]),
        ("data.corpus=blocks", ["config.data.path", "seqjax prepare"]),
        ("model.mixer.name=top1_chnk", ["config.model.mixer.name", "Did you mean 'top1_chunk'", "transformer_pp"]),
        ("model.mixer.name=no.such.module", ["no module 'no'"]),
        ("model.mixer.name=seqjax.files", ["must define one class that derives from seqjax.mixers.base.Mixer"]),
        ("model.mixer.name=transformer_pp,model.mixer.chunk_size=4", ["no setting 'chunk_size'", "rope_base"]),
        ("model.mixer=({'name':'mamba1'},{'nam':'mamba2'})", ["config.model.mixer.name must name a mixer"]),
        ("model.mixer=()", ["config.model.mixer is empty"]),
        ("model.mixer[0].heads=4", ["there is one model.mixer", "write model.mixer.heads"]),
        ("model.mixer[0].name=mamba1", ["there is one model.mixer"]),
        ("model.mixer[0]=3", ["no setting 'mixer[0]'"]),
        ("model.pattern=()", ["no setting 'pattern'"]),
        ("model.mixer.shell.lnx=False", ["no group 'shell'"]),
        ("model.mixer=3", ["config.model.mixer.name must name a mixer"]),
        ("model.mixer.chunk_size=0", ["chunk_size=0", "1 to 128"]),
        ("model.mixer.chunk_size=129", ["chunk_size=129", "config.train.seq_len=128"]),
        ("model.mixer.top_k=0", ["config.model.mixer.top_k=0 selects no past chunk", "choose 1"]),
        ("model.mixer.chunk_size=32,model.mixer.top_k=4", ["top_k=4 is more than the 3", "config.train.seq_len=128"]),
        ("model.mixer.selection=shortlist,model.mixer.shortlist=1,model.mixer.top_k=2", ["set shortlist to 2 or more"]),
        ("model.mixer.selection=exactly", ["config.model.mixer.selection='exactly'", "Did you mean 'exact'", "approx"]),
        ("model.mixer.heads=3", ["heads=3", "config.model.dim=64"]),
        ("model.mixer.heads=0", ["heads", "at least 1"]),
        ("model.mixer.kv_heads=4,model.mixer.heads=2", ["kv_heads=4"]),
        ("model.mixer.kv_heads=-1", ["kv_heads"]),
        ("model.mixer.kv_heads=0", ["at least 1", "None means"]),
        ("model.mixer.position=learned", ["config.model.mixer.position='learned'", "none, rope"]),
        ("model.mixer.head_dim=7", ["head width 7", "even"]),
        ("model.mixer.head_dim=-8", ["head_dim"]),
        ("model.mixer.rope_base=-1.0", ["rope_base"]),
        ("model.mixer.rope_base=0", ["config.model.mixer.rope_base", "position=none"]),
        ("model.mixer.rope_scaling=llama3", ["no setting 'rope_scaling'"]),
        (f"{SOFTMAX},model.mixer.rope_scaling=yarn", ["rope_scaling='yarn' is not known", "linear, llama3, none"]),
        (f"{SOFTMAX},model.mixer.rope_factor=0.5", ["config.model.mixer.rope_factor=0.5", "at least 1"]),
        (f"{SOFTMAX},model.mixer.rope_factor=1e999", ["config.model.mixer.rope_factor=inf", "finite"]),
        (f"{SOFTMAX},model.mixer.rope_low_freq_factor=4", ["rope_low_freq_factor=4.0", "rope_high_freq_factor=4.0"]),
        (f"{SOFTMAX},model.mixer.rope_original_len=0", ["config.model.mixer.rope_original_len must be at least 1"]),
        (f"{SOFTMAX},model.mixer.rope_scaling=linear,model.mixer.position=alibi", ["rope_scaling='linear'", "'alibi'"]),
        (f"{SOFTMAX},model.mixer.qk_norm_eps=0", ["config.model.mixer.qk_norm_eps=0"]),
        (f"model.mixer.head_dim={2**62}", ["config.model.mixer.head_dim must be"]),
        (f"model.mixer.heads={2**62}", ["config.model.mixer.heads must be"]),
        ("model.norm_eps=0", ["config.model.norm_eps must be"]),
        (f"model.dim={2**62}", ["config.model.dim must be"]),
        (f"model.vocab_size={2**31}", ["config.model.vocab_size must be"]),
        (f"train.batch_size={2**40}", ["config.train.batch_size must be"]),
        ("model=7", ["config.model must be a group"]),
        ("optim.lr=1e999", ["config.optim.lr must be at least 0 and finite, not inf"]),
        ("train.seed=-1", ["config.train.seed must be at least 0 and less than 4294967296, not -1"]),
        ("train.seed=4294967296", ["config.train.seed must be at least 0 and less than 4294967296"]),
        ("data.seed=-1", ["config.data.seed must be at least 0"]),
        ("eval.seed=100000000000000000000000", ["config.eval.seed must be at least 0 and less than 4294967296"]),
        ("data.workers=2000", ["config.data.workers must be at least 0 and less than 1025"]),
        ("model.remat=some", ["config.model.remat", "attention, dots, full, none"]),
        ("model.dtype=float16", ["config.model.dtype"]),
        ("model.mlp.kind=relu", ["config.model.mlp.kind"]),
        ("model.mlp.dim=0", ["config.model.mlp.dim", "or None"]),
        ("optim.clip_norm=0", ["config.optim.clip_norm=0", "None disables clipping"]),
        ("optim.name=adamw", ["config.optim.name", "adamw", "muon"]),
        ("optim.name=muon,optim.muon_scale=2", ["config.optim.muon_scale", "spectral"]),
        ("optim.name=muon,optim.muon_momentum=1.0", ["config.optim.muon_momentum"]),
        ("optim.name=muon,optim.adam_lr=-1", ["config.optim.adam_lr"]),
        ("optim.name=muon,optim.lr=0,optim.adam_lr=1e-3", ["config.optim.lr=0", "config.optim.adam_lr=0.001"]),
        ("optim.adam_lr=1e-3", ["config.optim.adam_lr=0.001", "config.optim.name='adam'"]),
        ("optim.muon_scale=rms", ["config.optim.muon_scale='rms'", "config.optim.name='adam'"]),
        ("optim.muon_momentum=0.9", ["config.optim.muon_momentum=0.9", "config.optim.name='adam'"]),
        ("optim.schedule=wsd", ["config.optim.schedule", "cosine"]),
        ("optim.schedule=cosine,train.ends=(0.5,1)", ["config.optim.schedule='cosine'", "config.train.ends"]),
        ("optim.clip_norm=much", ["config.optim.clip_norm must be float or None", "'much'"]),
        ("eval.batch_size=0", ["config.eval.batch_size", "or None"]),
        ("log.profile_start=0", ["config.log.profile_start", "or None"]),
        ("train.accumulate=0", ["config.train.accumulate", "or None"]),
        ("train.per_device_batch_size=0", ["config.train.per_device_batch_size", "or None"]),
        ("train.per_device_batch=4", ["no setting 'per_device_batch'", "Did you mean 'per_device_batch_size'"]),
        ("train.accumulate=3", ["config.train.batch_size=4", "config.train.accumulate=3"]),
        ("checkpoint.keep=0", ["config.checkpoint.keep"]),
        ("eval.tokens=0", ["config.eval.tokens"]),
        ("eval.every=-1", ["config.eval.every"]),
        ("optim.lr=-1", ["config.optim.lr"]),
        ("optim.b2=1.0", ["config.optim.b2"]),
        ("log.every=0", ["config.log.every"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arg, says):
    with pytest.raises(UserError) as caught:
        load("top1_chunk", arg if arg in ("huge", "debgu", "limted") else f"debug,{arg}")
    for part in says:
        assert part in str(caught.value)


# Of five mixers: convolution, linear attention, window attention, convolution, convolution.
@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("model.mixer.window=3", ["model.mixer has 5 here", "2 transformer_pp", "model.mixer[2].window"]),
        ("model.mixer[5].window=3", ["model.mixer has 5 here"]),
        ("model.mixer[1].window=3", ["no setting 'window'", "feature_dim"]),
        ("model.mixer[2].windw=3", ["no setting 'windw'", "Did you mean 'window'"]),
        ("model.mixer[2].window=0", ["config.model.mixer[2].window=0"]),
        ("model.mixer[1].heads=many", ["config.model.mixer[1].heads must be int"]),
        ("model.mixer[0].name=mamba", ["'mamba' is not a mixer", "Did you mean 'mamba"]),
        ("model.n_layers=7", ["config.model.mixer has 5 mixers", "config.model.n_layers=7"]),
    ],
)
def test_what_is_wrong_in_one_of_several_mixers_is_named(arg, says):
    with pytest.raises(UserError) as caught:
        load("based", f"debug,{arg}")
    for part in says:
        assert part in str(caught.value)


def test_one_of_several_mixers_is_set_by_its_index():
    plain = load("based", "debug").model.mixer
    mixer = load(
        "based", "debug,model.mixer[2].window=5,model.mixer[2].kv_heads=1,model.mixer[0].name=mamba1"
    ).model.mixer
    assert (mixer[2].window, mixer[2].kv_heads, mixer[0].name) == (5, 1, "mamba1")
    assert mixer[1:2] + mixer[3:] == plain[1:2] + plain[3:], "the others stay as they were"


def test_a_missing_setting_is_named():
    config = get("top1_chunk", "debug")
    del config.train.steps
    with pytest.raises(UserError, match=r"config\.train\.steps is missing"):
        from_config_dict(config)


KEYS = [f"{group}.{key}" for group, keys in to_dict(load("top1_chunk", "debug")).items() if isinstance(keys, dict)
        for key in keys]  # fmt: skip
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=3))
def test_any_value_is_taken_or_refused_in_words(changes):
    """Whatever a config file holds, the answer is a Config or a UserError that names a key of `config`."""
    config = get("top1_chunk", "debug")
    with config.ignore_type():
        for key, value in changes.items():
            group, name = key.split(".")
            config[group][name] = value
    try:
        assert isinstance(from_config_dict(config), Config)
    except UserError as error:
        assert "config" in str(error)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="demo,bug=.trainsp0123-[({'\" ", max_size=20))
def test_any_argument_is_taken_or_refused_in_words(arg):
    try:
        assert isinstance(load("transformer_pp", arg), Config)
    except UserError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("data.train_domains", "prose,doctest", ("prose", "doctest")),
        ("data.train_domains", "2020, 2021", ("2020", "2021")),
        ("data.weights", "0.25,0.75", (0.25, 0.75)),
        ("train.ends", "0.5,1.0", (0.5, 1.0)),
        ("eval.path", "a,b", ("a", "b")),
    ],
)
def test_lists_are_written_with_commas(key, text, value):
    config = presets.read_config("transformer_pp:debug", [(key, text)])
    group, name = key.split(".")
    assert config[group][name] == value


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(("key", "value"), [("data.train_domains", "prose,c_code"), ("train.ends", "0.5,1.0")])
def test_the_remedy_for_a_list_inside_config_works_in_a_shell(shell, key, value):
    """As the error writes it, with a config for NAME."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    arg = f"debug,{key}={value},optim.lr=1e-3"
    with pytest.raises(UserError) as error:
        presets.read_config(f"transformer_pp:{arg}")
    inside = re.search(r"'(?:--config=NAME:.*?\(.*?)'", str(error.value))
    apart = re.search(r"--config\.\S+=\S+(?= apart)", str(error.value))
    assert inside and apart
    program = "import sys; print(sys.argv[1:])"
    for words in (inside[0], f"--config=NAME:debug {apart[0]}"):
        command = [shell, "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {words}"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (config,), overrides = train.split_overrides(ast.literal_eval(said))
        found = from_config_dict(presets.read_config(config.replace("--config=NAME", "transformer_pp"), overrides))
        group, name = key.split(".")
        assert (
            getattr(getattr(found, group), name)
            == presets.read_config("transformer_pp:debug", [(key, value)])[group][name]
        )
