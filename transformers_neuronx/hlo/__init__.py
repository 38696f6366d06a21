"""PyHLO with shape rules: one function per operation, and arithmetic on tensors.

Each function checks its operands, says what it wanted and what it got, and works out the shape of the result.
"""

from transformers_neuronx.pyhlo import Tensor

# isort: off
from transformers_neuronx.hlo.elementwise import abs as abs
from transformers_neuronx.hlo.elementwise import add as add
from transformers_neuronx.hlo.elementwise import bitcast_convert as bitcast_convert
from transformers_neuronx.hlo.elementwise import broadcast_to as broadcast_to
from transformers_neuronx.hlo.elementwise import ceil as ceil
from transformers_neuronx.hlo.elementwise import clamp as clamp
from transformers_neuronx.hlo.elementwise import constant as constant
from transformers_neuronx.hlo.elementwise import convert as convert
from transformers_neuronx.hlo.elementwise import cos as cos
from transformers_neuronx.hlo.elementwise import divide as divide
from transformers_neuronx.hlo.elementwise import equal as equal
from transformers_neuronx.hlo.elementwise import erf as erf
from transformers_neuronx.hlo.elementwise import exp as exp
from transformers_neuronx.hlo.elementwise import expm1 as expm1
from transformers_neuronx.hlo.elementwise import floor as floor
from transformers_neuronx.hlo.elementwise import full as full
from transformers_neuronx.hlo.elementwise import greater as greater
from transformers_neuronx.hlo.elementwise import greater_equal as greater_equal
from transformers_neuronx.hlo.elementwise import is_finite as is_finite
from transformers_neuronx.hlo.elementwise import less as less
from transformers_neuronx.hlo.elementwise import less_equal as less_equal
from transformers_neuronx.hlo.elementwise import log as log
from transformers_neuronx.hlo.elementwise import log1p as log1p
from transformers_neuronx.hlo.elementwise import logical_and as logical_and
from transformers_neuronx.hlo.elementwise import logical_not as logical_not
from transformers_neuronx.hlo.elementwise import logical_or as logical_or
from transformers_neuronx.hlo.elementwise import logical_xor as logical_xor
from transformers_neuronx.hlo.elementwise import logistic as logistic
from transformers_neuronx.hlo.elementwise import maximum as maximum
from transformers_neuronx.hlo.elementwise import minimum as minimum
from transformers_neuronx.hlo.elementwise import multiply as multiply
from transformers_neuronx.hlo.elementwise import negate as negate
from transformers_neuronx.hlo.elementwise import not_equal as not_equal
from transformers_neuronx.hlo.elementwise import power as power
from transformers_neuronx.hlo.elementwise import remainder as remainder
from transformers_neuronx.hlo.elementwise import round as round
from transformers_neuronx.hlo.elementwise import rsqrt as rsqrt
from transformers_neuronx.hlo.elementwise import select as select
from transformers_neuronx.hlo.elementwise import shift_left as shift_left
from transformers_neuronx.hlo.elementwise import shift_right as shift_right
from transformers_neuronx.hlo.elementwise import sign as sign
from transformers_neuronx.hlo.elementwise import sin as sin
from transformers_neuronx.hlo.elementwise import sqrt as sqrt
from transformers_neuronx.hlo.elementwise import subtract as subtract
from transformers_neuronx.hlo.elementwise import tanh as tanh
from transformers_neuronx.hlo.shaping import concatenate as concatenate
from transformers_neuronx.hlo.shaping import dynamic_slice as dynamic_slice
from transformers_neuronx.hlo.shaping import dynamic_update_slice as dynamic_update_slice
from transformers_neuronx.hlo.shaping import iota as iota
from transformers_neuronx.hlo.shaping import pad as pad
from transformers_neuronx.hlo.shaping import reshape as reshape
from transformers_neuronx.hlo.shaping import reverse as reverse
from transformers_neuronx.hlo.shaping import scatter_rows as scatter_rows
from transformers_neuronx.hlo.shaping import slice as slice
from transformers_neuronx.hlo.shaping import split as split
from transformers_neuronx.hlo.shaping import take as take
from transformers_neuronx.hlo.shaping import take_rows as take_rows
from transformers_neuronx.hlo.shaping import transpose as transpose
from transformers_neuronx.hlo.contraction import all as all
from transformers_neuronx.hlo.contraction import any as any
from transformers_neuronx.hlo.contraction import argmax as argmax
from transformers_neuronx.hlo.contraction import dot as dot
from transformers_neuronx.hlo.contraction import element as element
from transformers_neuronx.hlo.contraction import max as max
from transformers_neuronx.hlo.contraction import mean as mean
from transformers_neuronx.hlo.contraction import min as min
from transformers_neuronx.hlo.contraction import reduce as reduce
from transformers_neuronx.hlo.contraction import sort as sort
from transformers_neuronx.hlo.contraction import sum as sum
from transformers_neuronx.hlo.contraction import top_k as top_k
from transformers_neuronx.hlo.control import all_gather as all_gather
from transformers_neuronx.hlo.control import all_reduce as all_reduce
from transformers_neuronx.hlo.control import composite as composite
from transformers_neuronx.hlo.control import conditional as conditional
from transformers_neuronx.hlo.control import custom_call as custom_call
from transformers_neuronx.hlo.control import optimization_barrier as optimization_barrier
from transformers_neuronx.hlo.control import reduce_scatter as reduce_scatter
from transformers_neuronx.hlo.control import replica_id as replica_id
from transformers_neuronx.hlo.control import while_loop as while_loop
# isort: on

_OPERATORS = {
    "__add__": add,
    "__sub__": subtract,
    "__mul__": multiply,
    "__truediv__": divide,
    "__neg__": negate,
    "__lt__": less,
    "__le__": less_equal,
    "__gt__": greater,
    "__ge__": greater_equal,
    "__and__": logical_and,
    "__or__": logical_or,
    "__invert__": logical_not,
    "__radd__": lambda x, number: add(number, x),
    "__rsub__": lambda x, number: subtract(number, x),
    "__rmul__": lambda x, number: multiply(number, x),
    "__rtruediv__": lambda x, number: divide(number, x),
}
# The scribe's tensors know no shape rules, so their operators are these functions.
for _name, _function in _OPERATORS.items():
    setattr(Tensor, _name, _function)
