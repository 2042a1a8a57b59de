"""The native kernel inside torch.compile and torch.export: one graph, the same bits."""

import pytest
import torch

import polyscale as ps
from polyscale.ops.opened.native.library import LIBRARY
from tests.ops.opened.cases import random_case

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")


def attend(query, key, value, **options):
    return ps.opened_attention(query, key, value, heavy=32, near=16, impl="native", **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"strict": True}, {"rest": "pool"}, {"key_padding_mask": torch.arange(150)[None] < 20}],
    ids=["drop", "strict", "pool", "padding"],
)
def test_compiled_as_one_graph_values_and_gradients_have_the_same_bits(options):
    torch.manual_seed(0)
    tensors = random_case(150, batch=1, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    output, expected = compiled(*tensors, **options), attend(*tensors, **options)
    assert torch.equal(output, expected)
    cotangent = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, tensors, cotangent),
        torch.autograd.grad(expected, tensors, cotangent),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_compiled_graph_has_the_same_audit_and_takes_later_parts_of_any_length():
    torch.manual_seed(0)

    def audited(query, key, value):
        output, audit = attend(query, key, value, return_audit=True)
        return output, audit.rows, audit.kept, audit.kl, audit.opened

    torch._dynamo.reset()
    compiled = torch.compile(audited, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries, keys in ((70, 300), (141, 333)):
        tensors = [x.detach() for x in random_case(queries, keys, dtype=torch.float32)]
        for ours, theirs in zip(compiled(*tensors), audited(*tensors), strict=True):
            assert torch.equal(ours, theirs)


def test_an_exported_program_takes_prompts_of_other_lengths():
    torch.manual_seed(0)

    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value)

    tensors = [x.detach() for x in random_case(200, dtype=torch.float32)]
    length = {2: torch.export.Dim.AUTO}
    program = torch.export.export(Attention(), tuple(tensors), dynamic_shapes=(length,) * 3)
    for size in (200, 333, 1000):
        tensors = [x.detach() for x in random_case(size, dtype=torch.float32)]
        assert torch.equal(program.module()(*tensors), attend(*tensors))
