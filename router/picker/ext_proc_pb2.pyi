from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("request_headers", "response_headers", "request_body", "response_body", "request_trailers", "response_trailers", "metadata_context", "protocol_config")
    REQUEST_HEADERS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BODY_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BODY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TRAILERS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TRAILERS_FIELD_NUMBER: _ClassVar[int]
    METADATA_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    request_headers: Headers
    response_headers: Headers
    request_body: Body
    response_body: Body
    request_trailers: Trailers
    response_trailers: Trailers
    metadata_context: bytes
    protocol_config: Modes
    def __init__(self, request_headers: _Optional[_Union[Headers, _Mapping]] = ..., response_headers: _Optional[_Union[Headers, _Mapping]] = ..., request_body: _Optional[_Union[Body, _Mapping]] = ..., response_body: _Optional[_Union[Body, _Mapping]] = ..., request_trailers: _Optional[_Union[Trailers, _Mapping]] = ..., response_trailers: _Optional[_Union[Trailers, _Mapping]] = ..., metadata_context: _Optional[bytes] = ..., protocol_config: _Optional[_Union[Modes, _Mapping]] = ...) -> None: ...

class Headers(_message.Message):
    __slots__ = ("headers", "end_of_stream")
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_FIELD_NUMBER: _ClassVar[int]
    headers: bytes
    end_of_stream: bool
    def __init__(self, headers: _Optional[bytes] = ..., end_of_stream: _Optional[bool] = ...) -> None: ...

class HeaderMap(_message.Message):
    __slots__ = ("headers",)
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("key", "value", "raw_value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    RAW_VALUE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    raw_value: bytes
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., raw_value: _Optional[bytes] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("body", "end_of_stream", "end_of_stream_without_message")
    BODY_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_WITHOUT_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    end_of_stream: bool
    end_of_stream_without_message: bool
    def __init__(self, body: _Optional[bytes] = ..., end_of_stream: _Optional[bool] = ..., end_of_stream_without_message: _Optional[bool] = ...) -> None: ...

class Trailers(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Modes(_message.Message):
    __slots__ = ("request_body_mode", "response_body_mode")
    REQUEST_BODY_MODE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BODY_MODE_FIELD_NUMBER: _ClassVar[int]
    request_body_mode: int
    response_body_mode: int
    def __init__(self, request_body_mode: _Optional[int] = ..., response_body_mode: _Optional[int] = ...) -> None: ...

class Metadata(_message.Message):
    __slots__ = ("filter_metadata",)
    class FilterMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Struct
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Struct, _Mapping]] = ...) -> None: ...
    FILTER_METADATA_FIELD_NUMBER: _ClassVar[int]
    filter_metadata: _containers.MessageMap[str, Struct]
    def __init__(self, filter_metadata: _Optional[_Mapping[str, Struct]] = ...) -> None: ...

class Struct(_message.Message):
    __slots__ = ("fields",)
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.MessageMap[str, Value]
    def __init__(self, fields: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("string_value", "list_value")
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    LIST_VALUE_FIELD_NUMBER: _ClassVar[int]
    string_value: str
    list_value: ListValue
    def __init__(self, string_value: _Optional[str] = ..., list_value: _Optional[_Union[ListValue, _Mapping]] = ...) -> None: ...

class ListValue(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Text]
    def __init__(self, values: _Optional[_Iterable[_Union[Text, _Mapping]]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("string_value",)
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    string_value: str
    def __init__(self, string_value: _Optional[str] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("request_headers", "response_headers", "request_body", "response_body", "request_trailers", "response_trailers", "immediate_response", "dynamic_metadata")
    REQUEST_HEADERS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BODY_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BODY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TRAILERS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TRAILERS_FIELD_NUMBER: _ClassVar[int]
    IMMEDIATE_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_METADATA_FIELD_NUMBER: _ClassVar[int]
    request_headers: Answer
    response_headers: Answer
    request_body: Answer
    response_body: Answer
    request_trailers: Answer
    response_trailers: Answer
    immediate_response: Immediate
    dynamic_metadata: Told
    def __init__(self, request_headers: _Optional[_Union[Answer, _Mapping]] = ..., response_headers: _Optional[_Union[Answer, _Mapping]] = ..., request_body: _Optional[_Union[Answer, _Mapping]] = ..., response_body: _Optional[_Union[Answer, _Mapping]] = ..., request_trailers: _Optional[_Union[Answer, _Mapping]] = ..., response_trailers: _Optional[_Union[Answer, _Mapping]] = ..., immediate_response: _Optional[_Union[Immediate, _Mapping]] = ..., dynamic_metadata: _Optional[_Union[Told, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: Common
    def __init__(self, response: _Optional[_Union[Common, _Mapping]] = ...) -> None: ...

class Common(_message.Message):
    __slots__ = ("header_mutation", "body_mutation", "clear_route_cache")
    HEADER_MUTATION_FIELD_NUMBER: _ClassVar[int]
    BODY_MUTATION_FIELD_NUMBER: _ClassVar[int]
    CLEAR_ROUTE_CACHE_FIELD_NUMBER: _ClassVar[int]
    header_mutation: HeaderMutation
    body_mutation: BodyMutation
    clear_route_cache: bool
    def __init__(self, header_mutation: _Optional[_Union[HeaderMutation, _Mapping]] = ..., body_mutation: _Optional[_Union[BodyMutation, _Mapping]] = ..., clear_route_cache: _Optional[bool] = ...) -> None: ...

class HeaderMutation(_message.Message):
    __slots__ = ("set_headers", "remove_headers")
    SET_HEADERS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    set_headers: _containers.RepeatedCompositeFieldContainer[HeaderOption]
    remove_headers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, set_headers: _Optional[_Iterable[_Union[HeaderOption, _Mapping]]] = ..., remove_headers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HeaderOption(_message.Message):
    __slots__ = ("header", "append_action")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    APPEND_ACTION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    append_action: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., append_action: _Optional[int] = ...) -> None: ...

class BodyMutation(_message.Message):
    __slots__ = ("body", "streamed_response")
    BODY_FIELD_NUMBER: _ClassVar[int]
    STREAMED_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    streamed_response: Body
    def __init__(self, body: _Optional[bytes] = ..., streamed_response: _Optional[_Union[Body, _Mapping]] = ...) -> None: ...

class Immediate(_message.Message):
    __slots__ = ("status", "headers", "body")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    status: Status
    headers: HeaderMutation
    body: bytes
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., headers: _Optional[_Union[HeaderMutation, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: int
    def __init__(self, code: _Optional[int] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("fields",)
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Outer
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Outer, _Mapping]] = ...) -> None: ...
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.MessageMap[str, Outer]
    def __init__(self, fields: _Optional[_Mapping[str, Outer]] = ...) -> None: ...

class Outer(_message.Message):
    __slots__ = ("struct_value",)
    STRUCT_VALUE_FIELD_NUMBER: _ClassVar[int]
    struct_value: Struct
    def __init__(self, struct_value: _Optional[_Union[Struct, _Mapping]] = ...) -> None: ...

class HealthQuestion(_message.Message):
    __slots__ = ("service",)
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    service: str
    def __init__(self, service: _Optional[str] = ...) -> None: ...

class HealthAnswer(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: int
    def __init__(self, status: _Optional[int] = ...) -> None: ...
