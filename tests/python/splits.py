# SPDX-License-Identifier: Apache-2.0
"""The Python side of test_both_faces_split.py: what each case makes of its batch, as a line `case<TAB>parts`: those of
each microbatch, or the code that refuses them. Functions of the same names make up the C++ side,
tests/frontend/splits.cc.
"""

import re

import torch

import lamina


def shown(value):
    """Writes what a microbatch has got, as both faces do."""
    if isinstance(value, torch.Tensor):
        numbers = " ".join(str(int(each)) for each in value.to_dense().flatten().tolist())
        return f"{list(value.shape)}<{numbers}>"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {shown(item)}' for key, item in value.items())})"
    return str(value)


def parts(*batches, microbatches=4, **options):
    """The parts of each batch, which one step function splits after the other."""
    lamina.init(microbatches=microbatches)
    got = []

    @lamina.step(**options)
    def step(**given):
        got.append(shown(tuple(given.values())))

    for batch in batches:
        step(**{str(number): value for number, value in enumerate(batch)})
    return "; ".join(got)


def x(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def along(axis, argument=0):
    return {"input_split_axes": {str(argument): axis}}


def rows_of_a_tensor():
    return parts([x(8, 2)])


def a_batch_that_does_not_divide():
    return parts([x(6)])


def a_batch_of_fewer_samples():
    return parts([x(2)])


def a_batch_of_no_samples():
    return parts([x(0, 2)])


def several_rows_for_each_sample():
    return parts([x(5), x(10)])


def another_axis():
    return parts([x(2, 4)], **along(1))


def the_last_axis():
    return parts([x(2, 4)], **along(-1))


def a_tensor_without_axes():
    return parts([x(4), torch.tensor(7)])


def an_argument_that_is_whole():
    return parts([x(4), x(3)], non_split_inputs=["1"])


def numbers_and_words():
    return parts([x(4), 3, "word"])


def containers_of_tensors():
    return parts([{"a": [x(4), x(8)], "b": [x(4)]}, (x(4, 2), 5)])


def one_tensor_twice():
    each = x(5)
    return parts([each, [each, each]])


def a_sparse_tensor():
    return parts([torch.eye(4).to_sparse()])


def pictures():
    return [torch.full((3, 1 + number % 2), number) for number in range(4)]


def pictures_beside_classes():
    return parts([pictures(), x(4)])


def pictures_in_a_dictionary():
    return parts([{"pictures": pictures() + pictures()[:1]}, x(5)])


def words_beside_rows():
    return parts([["a", "b", "c", "d"], x(4)])


def words_of_another_number():
    return parts([["a", "b", "c"], x(4)])


def a_size_as_long_as_the_batch():
    return parts([(3, 5, 3, 5), x(4)])


def lists_of_rows_beside_rows():
    return parts([[x(4, 1), x(4)], x(4)])


def a_list_in_a_smaller_batch():
    return parts(*([[x(rows, 5, 1)] * 3] for rows in (8, 3)))


def one_microbatch():
    return parts([x(4), x(3)], microbatches=1)


def offsets_that_are_rows():
    return parts([x(8), torch.tensor([0, 2, 3, 8])], **along(0, 1))


def a_tensor_that_does_not_fit():
    return parts([x(8), x(6)])


def a_list_that_may_be_either():
    return parts([[torch.ones(3, 2, 2)] * 8])


def a_list_inside_that_may_be_either():
    return parts([{"a": [torch.ones(3, 2, 2)] * 8}])


def an_axis_that_is_not_there():
    return parts([x(8)], **along(1))


def offsets_into_another_tensor():
    return parts([x(8), torch.tensor([0, 2, 3, 8])])


def offsets_by_their_name():
    return parts([x(8), {"cu_seqlens": torch.tensor([0, 2, 2, 6])}])


def sorted_classes():
    return parts([x(8), {"classes": torch.tensor([0, 2, 2, 6])}])


def a_nested_tensor():
    return parts([torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)])])


def a_compressed_tensor():
    return parts([torch.eye(4).to_sparse_csr()])


def merged(returned, merge, *batches):
    lamina.init(microbatches=4)
    step = lamina.step(returned)
    return shown(merge(step(*batches)))


def a_mean_that_counts_samples():
    return merged(lambda x: x.float().mean(), lambda output: 60 * output.reduce_mean(), x(6))


def a_mean_of_integers():
    return merged(lambda x: x.sum(), lambda output: 4 * output.reduce_mean(), x(7))


def a_sum():
    return merged(lambda x: x.sum(), lambda output: output.reduce_sum(), x(7))


def rows_in_a_row():
    return merged(lambda x: x, lambda output: output.concat(), x(6))


def losses_in_a_row():
    return merged(lambda x: x.sum(), lambda output: output.concat(), x(6))


def rows_that_do_not_stack():
    return merged(lambda x: x, lambda output: output.stack(), x(6))


def rows_without_a_mean():
    return merged(lambda x: x, lambda output: output.reduce_mean(), x(6))


CASES = (
    rows_of_a_tensor,
    a_batch_that_does_not_divide,
    a_batch_of_fewer_samples,
    a_batch_of_no_samples,
    several_rows_for_each_sample,
    another_axis,
    the_last_axis,
    a_tensor_without_axes,
    an_argument_that_is_whole,
    numbers_and_words,
    containers_of_tensors,
    one_tensor_twice,
    a_sparse_tensor,
    pictures_beside_classes,
    pictures_in_a_dictionary,
    words_beside_rows,
    words_of_another_number,
    a_size_as_long_as_the_batch,
    lists_of_rows_beside_rows,
    a_list_in_a_smaller_batch,
    one_microbatch,
    offsets_that_are_rows,
    a_tensor_that_does_not_fit,
    a_list_that_may_be_either,
    a_list_inside_that_may_be_either,
    an_axis_that_is_not_there,
    offsets_into_another_tensor,
    offsets_by_their_name,
    sorted_classes,
    a_nested_tensor,
    a_compressed_tensor,
    a_mean_that_counts_samples,
    a_mean_of_integers,
    a_sum,
    rows_in_a_row,
    losses_in_a_row,
    rows_that_do_not_stack,
    rows_without_a_mean,
)


def main():
    """The Python side."""
    for case in CASES:
        try:
            text = case()
        except lamina.UsageError as error:
            text = f"refused: {error.code or re.search('has no[^:]*', str(error))[0]}"
        print(f"{case.__name__}\t{text}", flush=True)
        lamina.shutdown()


if __name__ == "__main__":
    main()
