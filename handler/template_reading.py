"""Reads a chat template's syntax tree to learn what it can take.

Must not know: rendering, requests.
"""

from jinja2 import nodes


def takes_parts(tree: nodes.Template) -> bool:
    """Whether the template walks a message's content as a list of parts.

    True where a loop runs over an expression that is some message's `content`: the key itself
    through any filters, a variable set from it, or a macro's parameter that it is passed to.
    """
    names: set[str] = set()
    while True:  # a name may be set from another one that is found only later
        found = names | _names_of_content(tree, names)
        if found == names:
            break
        names = found
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names)
    return False


def _names_of_content(tree: nodes.Template, names: set[str]) -> set[str]:
    found: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            found.add(assign.target.name)
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, argument in zip(macro.args, call.args, strict=False):
            if _is_content(argument, names):
                found.add(parameter.name)
        for keyword in call.kwargs:
            if _is_content(keyword.value, names):
                found.add(keyword.key)
    return found
