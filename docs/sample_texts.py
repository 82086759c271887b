"""Random docstrings and error messages of the product, for readers who say what each means: docs/sample_texts.py --seed 1.

Each text is printed with the signature of its function or class, and with the docstring that documentation shows above it:
that of the class, for a method, or else that of the module. Before a message stand the class of the exception and a file that
it names, since both are printed with it. So a reader who knows PyTorch, but not this project, needs no other file. The seed is
printed first. The goal is that 38 of 40 docstrings and 19 of 20 messages are understood.
"""

import argparse
import ast
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("attacker", "defenses", "fedleak", "fedsim", "benchmarks", "deploy")
MIN_WORDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="a random one by default")
    parser.add_argument("--docstrings", type=int, default=40)
    parser.add_argument("--messages", type=int, default=20)
    options = parser.parse_args()
    docstrings, messages = read_texts(Path(__file__).parents[1])
    rng = random.Random(options.seed)
    print(f"seed {options.seed}: of {len(docstrings)} docstrings and {len(messages)} messages\n")
    for title, texts, count in (("docstring", docstrings, options.docstrings), ("message", messages, options.messages)):
        for number, (where, text) in enumerate(rng.sample(texts, min(count, len(texts))), start=1):
            print(f"{title} {number}, {where}\n    " + text.replace("\n", "\n    ").rstrip() + "\n")


def read_texts(root: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the docstrings and the error messages of the packages in `root` that have at least `MIN_WORDS` words.

    Each is a pair of the place where it stands and the text. A docstring is followed by that of its class or module.
    """
    docstrings, messages = [], []
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    constants = read_constants(paths)
    for path in paths:
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        described: dict[str, str] = {}
        for name, node in list_definitions(tree, ""):
            text = described[name] = ast.get_docstring(node) or ""
            above = described[name.rpartition(".")[0]] if name else ""
            if len(text.split()) >= MIN_WORDS:
                docstrings.append((f"{format_signature(name, node)} in {module}", text + (above and f"\n\nABOVE IT: {above}")))
            messages += [(f"{name or 'module'} in {module}", said) for said in list_messages(node, constants)]
    return docstrings, messages


def format_signature(name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return "module", "class NAME", or the line that begins the definition of the function, without the colon."""
    if isinstance(node, ast.FunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {name}({ast.unparse(node.args)}){returned}"
    return f"class {name}" if name else "module"


def list_definitions(
    node: ast.Module | ast.ClassDef, outer: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """Yield a module or class with its qualified name, and all classes, functions and methods in it."""
    yield outer, node
    for child in node.body:
        name = f"{outer}.{getattr(child, 'name', '')}".lstrip(".")
        if isinstance(child, ast.ClassDef):
            yield from list_definitions(child, name)
        elif isinstance(child, ast.FunctionDef):
            yield name, child


def list_messages(node: ast.Module | ast.ClassDef | ast.FunctionDef, constants: dict[str, str]) -> Iterator[str]:
    """Yield "EXCEPTION: MESSAGE" for the exceptions that a function raises, with expressions in braces for values.

    An argument before the message, such as a file, stands before it in braces. A name in `constants` is replaced by its text.
    """
    if not isinstance(node, ast.FunctionDef):
        return
    for one in ast.walk(node):
        if not isinstance(one, ast.Raise) or not isinstance(one.exc, ast.Call):
            continue
        before: list[str] = []
        for argument in one.exc.args:
            text = format_text(argument, constants)
            if text is None:
                before.append(f"{{{ast.unparse(argument)}}}: ")
            elif len(text.split()) >= MIN_WORDS:
                yield f"{ast.unparse(one.exc.func)}: {''.join(before)}{text}"


def format_text(node: ast.expr, constants: dict[str, str]) -> str | None:
    """Return the text of a string or formatted string, or None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if not isinstance(node, ast.JoinedStr):
        return None
    texts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            name = ast.unparse(part.value)
            texts.append(constants.get(name, f"{{{name}}}"))
        elif isinstance(part, ast.Constant):
            texts.append(str(part.value))
    return "".join(texts)


def read_constants(paths: Iterable[Path]) -> dict[str, str]:
    """Return the values of all module constants that are texts, numbers, or tuples of these, by their names.

    A name that two modules give different values is left out.
    """
    found: dict[str, set[str]] = {}
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                try:
                    value = str(ast.literal_eval(node.value))
                except ValueError:  # an expression, such as 10**8
                    value = f"{{{node.targets[0].id}}}"
                found.setdefault(node.targets[0].id, set()).add(value)
    return {name: next(iter(values)) for name, values in found.items() if name.isupper() and len(values) == 1}


if __name__ == "__main__":
    main()
