"""The building blocks of mixers and models: parameters, initialisers, layers."""

from seqjax.nn.initializers import constant, normal, orthogonal, residual_init, uniform, values
from seqjax.nn.layers import LayerNorm, Linear, Mlp, RMSNorm, l2_normalize, save_choice, save_inputs
from seqjax.nn.params import auxiliary, param
from seqjax.nn.short_conv import ShortConv

__all__ = [
    "LayerNorm",
    "Linear",
    "Mlp",
    "RMSNorm",
    "ShortConv",
    "auxiliary",
    "constant",
    "l2_normalize",
    "normal",
    "orthogonal",
    "param",
    "residual_init",
    "save_choice",
    "save_inputs",
    "uniform",
    "values",
]
