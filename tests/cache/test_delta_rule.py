"""Gated delta nets by our kernels: what transformers computes, with the same bits however many
tokens are read together."""

from __future__ import annotations

import pytest
import torch
from tiny import build
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from draftproof.cache.current_read import recording
from draftproof.cache.delta_rule import causal_conv, delta_gates, delta_rule
from draftproof.cache.state_patches import several_queries, windows_of
from draftproof.core.tree import TokenTree
from draftproof.model.target import Target
from draftproof.native.kernels import kernels
from draftproof.native.threads import thread_count, torch_alone
from draftproof.weights.packed_linear import pack_linears

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")


@pytest.mark.parametrize("size", [(1, 1, 2, 4, 8, 8), (2, 5, 2, 2, 128, 128), (3, 9, 2, 6, 10, 70)])
def test_delta_rule_matches_transformers_bitwise_in_blocks_and_by_token(
    size: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    rows, tokens, groups, heads, inner, depth = size
    query, key = torch.randn(2, rows, tokens, groups, inner)
    value, before = torch.randn(rows, tokens, heads, depth), torch.randn(rows, heads, inner, depth)
    decay, rate = -5 * torch.rand(rows, tokens, heads), torch.rand(rows, tokens, heads)
    wanted = qwen.torch_recurrent_gated_delta_rule(
        query, key, value, g=decay, beta=rate, initial_state=before, output_final_state=True,
        use_qk_l2norm_in_kernel=True)
    done = delta_rule(query, key, value, decay, rate, before)
    assert done is not None
    torch.testing.assert_close((done[0], done[1].last), wanted, rtol=1e-5, atol=1e-6)
    state = before
    for token in range(tokens):
        part = slice(token, token + 1)
        token_alone = delta_rule(query[:, part], key[:, part], value[:, part], decay[:, part],
                         rate[:, part], state)
        assert token_alone is not None
        state, after = token_alone[1].last, torch.empty_like(before[0])
        assert torch.equal(token_alone[0], done[0][:, part])
        done[1].after(rows - 1, range(token + 1), after)
        assert torch.equal(after, state[rows - 1]), "a state after part of a block"


PARENTS = [[-1, 0, 0, 2, 1, 2, 3, 0, 6], [-1, 0, 1, 2, 2, 4, 1, 6, 7],
           [-1, 0, 1, 2, 3, 4, 5, 6, 6]]
"""Three trees of nine nodes; the last node may be the second child of one before."""


def paths(parents: list[int]) -> list[list[int]]:
    """The nodes from the root to each node."""
    to_node = list[list[int]]()
    for node, parent in enumerate(parents):
        to_node.append([*(to_node[parent] if parent >= 0 else []), node])
    return to_node


def test_a_node_of_a_tree_has_the_bits_of_its_path_as_a_chain() -> None:
    torch.manual_seed(0)
    rows, tokens, groups, heads, inner, depth = len(PARENTS), 9, 2, 4, 12, 70
    query, key = torch.randn(2, rows, tokens, groups, inner)
    value, before = torch.randn(rows, tokens, heads, depth), torch.randn(rows, heads, inner, depth)
    decay, rate = -5 * torch.rand(rows, tokens, heads), torch.rand(rows, tokens, heads)
    parts = [query, key, value, decay, rate]
    tree = delta_rule(query, key, value, decay, rate, before, torch.tensor(PARENTS))
    inputs, weight = torch.randn(rows, 70, 3 + tokens).bfloat16(), torch.randn(70, 4).bfloat16()
    convolved = causal_conv(inputs, weight, None, "silu", tokens, torch.tensor(PARENTS))
    assert tree is not None and convolved is not None
    for row in range(rows):
        for path in paths(PARENTS[row]):
            alone = slice(row, row + 1)
            q, k, v, d, r = (part[alone, path] for part in parts)
            chain = delta_rule(q, k, v, d, r, before[alone])
            assert chain is not None
            assert torch.equal(chain[0][0, -1], tree[0][row, path[-1]])
            after = torch.empty_like(before[0])
            tree[1].after(row, path, after)
            assert torch.equal(after, chain[1].last[0])
            places = [0, 1, 2, *(3 + node for node in path)]
            conv = causal_conv(inputs[alone][:, :, places], weight, None, "silu", len(path))
            assert conv is not None
            assert torch.equal(conv[0, :, -1], convolved[row, :, 3 + path[-1]])


def test_windows_of_a_convolution_follow_the_tree() -> None:
    """Where our kernel does not compute it: the inputs of each node's path."""
    inputs = torch.arange(len(PARENTS) * 11.0).view(-1, 1, 11).expand(-1, 3, -1)
    windows = windows_of(inputs, torch.tensor(PARENTS), 4)
    for row, parents in enumerate(PARENTS):
        for path in paths(parents):
            places = [0, 1, *(2 + node for node in path)][-4:]
            wanted = torch.zeros(4)
            wanted[4 - len(places) :] = inputs[row, 0, places]
            assert torch.equal(windows[row, path[-1]], wanted.expand(3, -1))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_matches_transformers(
    taps: int, activation: str | None
) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 70, 9).bfloat16(), torch.randn(70, taps).bfloat16()
    for bias in (None, torch.randn(70).bfloat16()):
        wanted = qwen.causal_conv1d_fn(inputs, weight, bias, activation=activation)
        for tokens in (1, 5, 9):
            done = causal_conv(inputs, weight, bias, activation, tokens)
            assert done is not None
            torch.testing.assert_close(done[:, :, -tokens:], wanted[:, :, -tokens:], rtol=2e-2,
                                       atol=1e-2)
    assert causal_conv(inputs, weight, None, "gelu", 1) is None


def test_gates_match_transformers() -> None:
    torch.manual_seed(0)
    time, much = 9 * torch.randn(2, 2, 5, 6).bfloat16()
    fall, bias = torch.randn(2, 6)
    gates = delta_gates(time, much, fall, bias)
    assert gates is not None
    decay = -fall.exp() * torch.nn.functional.softplus(time.float() + bias)
    torch.testing.assert_close(gates[0], decay)
    torch.testing.assert_close(gates[1], much.sigmoid().float(), rtol=1e-2, atol=1e-3)


@torch.inference_mode()
def test_a_token_is_bit_identical_in_batches_of_any_size() -> None:
    model = build("Qwen3_5TextConfig", 0, hidden_size=64, intermediate_size=96, head_dim=16,
                  num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, vocab_size=96,
                  layer_types=["linear_attention", "full_attention", "linear_attention"],
                  linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
                  linear_value_head_dim=16, initializer_range=0.2, bos_token_id=None,
                  eos_token_id=None, pad_token_id=None).bfloat16()
    pack_linears(model)
    target, read = Target(model), dict[int, torch.Tensor]()
    for width in (1, 2, 3, 12):
        cache = target.new_cache(1, 64)
        target.read(TokenTree.chain(torch.arange(1, 6)[None]), cache)
        cache.keep(None, torch.tensor([5]))
        parts = []
        for start in range(6, 18, width):
            tokens = torch.arange(start, start + width)[None]
            target.read(TokenTree.chain((tokens + 40) % 96), cache)         # and commit nothing
            parts.append(target.read(TokenTree.chain(tokens), cache).logits)
            cache.keep(None, torch.tensor([width]))
        read[width] = torch.cat(parts, 1)
    assert all(torch.equal(logits, read[1]) for logits in read.values())
    assert target.reads_trees
    nodes = torch.arange(50, 59)[None].repeat(3, 1)
    cache = target.new_cache(3, 64)
    target.read(TokenTree.chain(torch.arange(1, 6).repeat(3, 1)), cache)
    cache.keep(None, torch.tensor([5, 4, 3]))
    tree = target.read(TokenTree(nodes, torch.tensor(PARENTS), 8), cache).logits
    for row, parents in enumerate(PARENTS):
        for path in paths(parents):
            chain = target.read(TokenTree.chain(nodes[:, path]), cache).logits
            assert torch.equal(chain[row, -1], tree[row, path[-1]])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_torch_is_never_asked_for_the_attention_of_few_queries(count: int) -> None:
    """In a read of ours: it rounds that of fewer than four in another way. Elsewhere as it was."""
    asked = list[int]()

    def attend(
        _: object, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, None]:
        asked.append(query.shape[2])
        scores = query @ key.transpose(2, 3) + mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    query, key, value = torch.randn(3, 2, 4, 9, 8).double()
    mask = torch.randn(2, 1, 9, 9).double()
    few = (torch.nn.Module(), query[:, :, :count], key, value, mask[:, :, :count])
    wanted, _ = attend(*few)
    patched = several_queries(attend)
    patched(*few)
    with recording(count):
        output, _ = patched(*few)
    torch.testing.assert_close(output, wanted)
    assert asked[:2] == [count, count] and asked[2] >= 4


def test_torch_runs_on_one_thread_while_ours_run_on_all() -> None:
    threads, of_kernels = torch.get_num_threads(), thread_count()
    with torch_alone():
        with torch_alone():
            assert (torch.get_num_threads(), thread_count()) == (1, of_kernels)
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), thread_count()) == (threads, of_kernels)
