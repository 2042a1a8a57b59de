"""What `ps.implementations()` lists, and how an operation gets there."""

import polyscale as ps
import polyscale.ops
from polyscale.ops.implementations import Implementation, operations

NEW_OPERATION = """
from polyscale.ops.backends import Backend, Operation

OPERATIONS = (
    Operation(
        "size",
        (
            Backend("reference", abs, "any number"),
            Backend("far", abs, "elsewhere", why_unavailable=lambda: "not on this machine"),
        ),
        preferred=("reference",),
    ),
)
"""


def test_every_operation_is_listed_with_its_reference_first_or_alone():
    listed = {}
    for found in ps.implementations():
        listed.setdefault(found.operation, []).append(found.name)
    assert listed["hkt_attention"] == ["reference", "sdpa", "native", "triton"]
    assert listed["hkt_decode"] == ["reference", "sdpa", "native"]
    assert listed["linear"] == ["reference", "native"]
    assert listed["linear_weight_gradient"] == ["reference", "native"]
    assert listed["downsample"] == ["reference", "native"]
    assert listed["hsa_attention"] == ["reference", "torch", "native"]
    assert listed["opened_attention"] == ["reference", "native", "flex"]
    assert listed["level_attention"] == ["reference", "native"]
    assert listed["hsa_step"] == ["torch", "native"]


def test_what_is_listed_is_what_operations_say():
    listed = [(found.operation, found.name) for found in ps.implementations()]
    declared = [(each.name, backend.name) for each in operations() for backend in each.backends]
    assert listed == declared
    assert Implementation._fields == ("operation", "name", "available", "reason")


def test_a_package_registers_its_operations_by_listing_them_in_its_api(monkeypatch, tmp_path):
    package = tmp_path / "size"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "api.py").write_text(NEW_OPERATION)
    (tmp_path / "helpers").mkdir()  # a package without an api has no operations
    (tmp_path / "helpers" / "__init__.py").write_text("")
    monkeypatch.setattr(polyscale.ops, "__path__", [*polyscale.ops.__path__, str(tmp_path)])
    found = [found for found in ps.implementations() if found.operation == "size"]
    assert found == [
        Implementation("size", "reference", True, "any number"),
        Implementation("size", "far", False, "not on this machine"),
    ]
