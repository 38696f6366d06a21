from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MetaTensor(_message.Message):
    __slots__ = ("name", "shape", "data_type", "content", "allow_dynamic_batch_size", "checkpoint_key", "type", "user_input_key")
    class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNDEFINED: _ClassVar[MetaTensor.DataType]
        FLOAT: _ClassVar[MetaTensor.DataType]
        INT32: _ClassVar[MetaTensor.DataType]
        BYTE: _ClassVar[MetaTensor.DataType]
        STRING: _ClassVar[MetaTensor.DataType]
        BOOL: _ClassVar[MetaTensor.DataType]
        UINT8: _ClassVar[MetaTensor.DataType]
        INT8: _ClassVar[MetaTensor.DataType]
        UINT16: _ClassVar[MetaTensor.DataType]
        INT16: _ClassVar[MetaTensor.DataType]
        INT64: _ClassVar[MetaTensor.DataType]
        FLOAT16: _ClassVar[MetaTensor.DataType]
        DOUBLE: _ClassVar[MetaTensor.DataType]
        BFLOAT16: _ClassVar[MetaTensor.DataType]
        F8E4M3FN: _ClassVar[MetaTensor.DataType]
        F8E5M2: _ClassVar[MetaTensor.DataType]
    UNDEFINED: MetaTensor.DataType
    FLOAT: MetaTensor.DataType
    INT32: MetaTensor.DataType
    BYTE: MetaTensor.DataType
    STRING: MetaTensor.DataType
    BOOL: MetaTensor.DataType
    UINT8: MetaTensor.DataType
    INT8: MetaTensor.DataType
    UINT16: MetaTensor.DataType
    INT16: MetaTensor.DataType
    INT64: MetaTensor.DataType
    FLOAT16: MetaTensor.DataType
    DOUBLE: MetaTensor.DataType
    BFLOAT16: MetaTensor.DataType
    F8E4M3FN: MetaTensor.DataType
    F8E5M2: MetaTensor.DataType
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNDEFINED_TYPE: _ClassVar[MetaTensor.Type]
        USER_INPUT: _ClassVar[MetaTensor.Type]
        INPUT_STATE: _ClassVar[MetaTensor.Type]
        INPUT_WEIGHT: _ClassVar[MetaTensor.Type]
    UNDEFINED_TYPE: MetaTensor.Type
    USER_INPUT: MetaTensor.Type
    INPUT_STATE: MetaTensor.Type
    INPUT_WEIGHT: MetaTensor.Type
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_DYNAMIC_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_KEY_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    USER_INPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    data_type: MetaTensor.DataType
    content: bytes
    allow_dynamic_batch_size: bool
    checkpoint_key: bytes
    type: MetaTensor.Type
    user_input_key: bytes
    def __init__(self, name: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[MetaTensor.DataType, str]] = ..., content: _Optional[bytes] = ..., allow_dynamic_batch_size: bool = ..., checkpoint_key: _Optional[bytes] = ..., type: _Optional[_Union[MetaTensor.Type, str]] = ..., user_input_key: _Optional[bytes] = ...) -> None: ...

class ModelConfig(_message.Message):
    __slots__ = ("num_infer", "timeout", "optimal_ncg_size", "async_load", "lazy_load", "return_aliases")
    NUM_INFER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OPTIMAL_NCG_SIZE_FIELD_NUMBER: _ClassVar[int]
    ASYNC_LOAD_FIELD_NUMBER: _ClassVar[int]
    LAZY_LOAD_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALIASES_FIELD_NUMBER: _ClassVar[int]
    num_infer: int
    timeout: int
    optimal_ncg_size: int
    async_load: bool
    lazy_load: bool
    return_aliases: bool
    def __init__(self, num_infer: _Optional[int] = ..., timeout: _Optional[int] = ..., optimal_ncg_size: _Optional[int] = ..., async_load: bool = ..., lazy_load: bool = ..., return_aliases: bool = ...) -> None: ...

class MetaNeff(_message.Message):
    __slots__ = ("input_tensors", "output_tensors", "model_config", "serialized_graph_def", "name", "output_aliases_to", "num_user_inputs", "num_states", "num_weights")
    class OutputAliasesToEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    INPUT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    SERIALIZED_GRAPH_DEF_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_ALIASES_TO_FIELD_NUMBER: _ClassVar[int]
    NUM_USER_INPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    input_tensors: _containers.RepeatedCompositeFieldContainer[MetaTensor]
    output_tensors: _containers.RepeatedCompositeFieldContainer[MetaTensor]
    model_config: ModelConfig
    serialized_graph_def: bytes
    name: bytes
    output_aliases_to: _containers.ScalarMap[int, int]
    num_user_inputs: int
    num_states: int
    num_weights: int
    def __init__(self, input_tensors: _Optional[_Iterable[_Union[MetaTensor, _Mapping]]] = ..., output_tensors: _Optional[_Iterable[_Union[MetaTensor, _Mapping]]] = ..., model_config: _Optional[_Union[ModelConfig, _Mapping]] = ..., serialized_graph_def: _Optional[bytes] = ..., name: _Optional[bytes] = ..., output_aliases_to: _Optional[_Mapping[int, int]] = ..., num_user_inputs: _Optional[int] = ..., num_states: _Optional[int] = ..., num_weights: _Optional[int] = ...) -> None: ...
