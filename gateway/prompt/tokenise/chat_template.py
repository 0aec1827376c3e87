"""A model's chat template, rendered as Transformers renders it (`transformers/utils/chat_template_utils.py`).

Templates come from the model's files and are programs. They run sandboxed, as there, on what clients send.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

from gateway.prompt.tokenise.conversation import Document, NoTokensError, conversation, template_variables

_RESERVED = ("chat_template", "tokenize", "messages", "tokenizer", "return_dict")
"""What a request may not hand to the template by itself."""
_STANDARD = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A compiled template.

    Attributes:
        content_parts: it goes through the parts of a message's content itself.
        system_first: it refuses system messages after others.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile a template.

        Args:
            source: Jinja source.
            special_tokens: `bos_token`, `eos_token` and so on, and what they are.

        Raises:
            ValueError: it is no Jinja template.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = special_tokens
        # A variable the template does not know is not handed to it.
        self._variables = (jinja2.meta.find_undeclared_variables(tree) | _STANDARD) - frozenset(_RESERVED)
        self._developer = "'developer'" in source or '"developer"' in source
        self.content_parts = goes_through_parts(tree)
        self.system_first = self._refuses_late_system()

    def render(self, document: Document) -> str:
        """Render the prompt of a chat.

        Args:
            document: body of a request for `/v1/chat/completions`.

        Raises:
            NoTokensError: it cannot be rendered here.
        """
        messages = conversation(document.get("messages"), self.content_parts, self._developer)
        given = template_variables(document)
        known = self._variables
        variables: dict[str, Any] = dict(self._special_tokens)
        variables.update((name, value) for name, value in given.items() if name in known)
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:
            # A template refuses what it does not like with whatever exception comes of it.
            raise NoTokensError("template", f"{type(error).__name__}: {error}") from error

    def _refuses_late_system(self) -> bool:
        """Ask the template as vLLM does (`vllm/entrypoints/anthropic/serving.py`)."""
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            self._template.render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        except Exception:  # noqa: BLE001 - a template fails in whatever way it likes; this one not of its own accord
            return False
        return False


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant has said; it renders as it stands."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: "jinja2.parser.Parser") -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def goes_through_parts(tree: nodes.Template) -> bool:
    """Say whether a template has a loop over a message's content, as vLLM finds it out (`vllm/renderers/hf.py`)."""
    messages = set(_names_of(tree, "messages"))
    items = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_access(loop.iter, name, None) for name in messages)
    }
    of_macros = _macro_parameters(tree, items)
    inside = {id(loop): macro.name for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        if any(_is_access(loop.iter, name, "content") for name in items):
            return True
        if isinstance(loop.iter, nodes.Name):
            macro = inside.get(id(loop))
            if loop.iter.name in of_macros.get(macro, ()) if macro is not None else loop.iter.name == "content":
                return True
    return False


def _names_of(tree: nodes.Template, name: str) -> Iterator[str]:
    """A variable, and those that are assigned from it or from its elements."""
    names = [name]
    yield name
    for known in names:
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in names and _is_access(assign.node, known, None):
                names.append(target.name)
                yield target.name


def _macro_parameters(tree: nodes.Template, items: set[str]) -> dict[str, set[str]]:
    """Parameters of macros that are called with a message's content."""
    found: dict[str, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = found.setdefault(macro.name, set())
        names = [argument.name for argument in macro.args]
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            for parameter, argument in zip(names, call.args, strict=False):
                if any(_is_access(argument, item, "content") for item in items):
                    parameters.add(parameter)
            for keyword in call.kwargs:
                if keyword.key in names and any(_is_access(keyword.value, item, "content") for item in items):
                    parameters.add(keyword.key)
    return found


def _is_access(node: nodes.Node, name: str, key: str | None) -> bool:
    """Say whether an expression is a variable, its attribute `key` if given, or a filtered, tested or sliced form."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_access(node.node, name, key)
    if isinstance(node, nodes.Test):
        return _is_access(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getitem):
        return (
            isinstance(node.node, nodes.Name)
            and node.node.name == name
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == key
        )
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == name and node.attr == key
    return False
