// SPDX-License-Identifier: Apache-2.0
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "tests/emulated/tensors.h"

// Operations that torch calls on accelerators only, so that the CPU has no kernel to take.
namespace emulated {
namespace {

using Ints = c10::IntArrayRef;
using MaybeTensor = std::optional<at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

bool given(const MaybeTensor& tensor) { return tensor && tensor->defined(); }

at::Tensor or_zeros(const MaybeTensor& tensor, const at::Tensor& like) {
  return given(tensor) ? *tensor : at::zeros_like(like);
}

// The integers of a convolution, kept for its kernel.
struct Geometry {
  std::vector<std::int64_t> stride, padding, dilation, output_padding;
  bool transposed;
  std::int64_t groups;
};

at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias, const Geometry& by) {
  return at::convolution(input, weight, bias, by.stride, by.padding, by.dilation, by.transposed, by.output_padding,
                         by.groups);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias, Ints stride,
                       Ints padding, Ints dilation, bool transposed, Ints output_padding, std::int64_t groups) {
  const Geometry by{stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups};
  const auto shape = convolve(outline(input), outline(weight), outline(bias), by);
  auto kernel = [by, x = twin(input), w = twin(weight), b = given(bias) ? MaybeTensor(twin(*bias)) : MaybeTensor()] {
    return std::vector{convolve(x, w, b, by)};
  };
  return enqueue_kernel(input.device(), {shape}, kernel)[0];
}

Three convolution_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Ints stride,
                           Ints padding, Ints dilation, bool transposed, Ints output_padding, std::int64_t groups,
                           std::array<bool, 3> mask) {
  const Geometry by{stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups};
  const auto channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto bias = at::empty({channels}, outline(weight).options());
  const std::vector<at::Tensor> all{outline(input), outline(weight), bias};
  std::vector<at::Tensor> wanted(3);
  for (std::size_t i = 0; i < 3; ++i) {
    wanted[i] = mask[i] ? all[i] : at::Tensor();
  }
  auto kernel = [by, mask, channels, g = twin(gradient), x = twin(input), w = twin(weight)] {
    auto [dx, dw, db] = at::convolution_backward(g, x, w, c10::IntArrayRef(channels), by.stride, by.padding,
                                                 by.dilation, by.transposed, by.output_padding, by.groups, mask);
    return std::vector{dx, dw, db};
  };
  const auto made = enqueue_kernel(input.device(), wanted, kernel);
  return {made[0], made[1], made[2]};
}

Two native_dropout(const at::Tensor& input, double p, std::optional<bool>) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return gradient.mul(mask).mul_(scale);
}

at::Tensor raised(const at::Tensor& tensor) {
  return tensor.defined() && tensor.element_size() < 4 ? tensor.to(at::kFloat) : tensor;
}

at::Tensor lowered(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() ? tensor.to(like.scalar_type()) : tensor;
}

// Accelerators keep a half tensor's mean and deviation in float, where the CPU keeps them in half.
Three native_layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized, const MaybeTensor& weight,
                        const MaybeTensor& bias, double epsilon) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(normalized).vec();
  const auto rows = input.dim() - static_cast<std::int64_t>(sizes.size());
  TORCH_CHECK(rows >= 0 && input.sizes().slice(rows) == sizes, "Given normalized_shape=", c10::IntArrayRef(sizes),
              ", got input of size ", input.sizes());
  auto kept = input.sizes().vec();
  std::fill(kept.begin() + rows, kept.end(), 1);
  const auto statistic = at::empty(kept, outline(input).options().dtype(raised(outline(input)).scalar_type()));
  auto kernel = [sizes, epsilon, x = twin(input), w = twin(weight.value_or(at::Tensor())),
                 b = twin(bias.value_or(at::Tensor()))] {
    auto [y, mean, deviation] = at::native_layer_norm(raised(x), sizes, raised(w), raised(b), epsilon);
    return std::vector{lowered(y, x), mean, deviation};
  };
  const auto made = enqueue_kernel(input.device(), {outline(input).contiguous(), statistic, statistic}, kernel);
  return {made[0], made[1], made[2]};
}

Three native_layer_norm_backward(const at::Tensor& gradient, const at::Tensor& input, c10::SymIntArrayRef normalized,
                                 const at::Tensor& mean, const at::Tensor& deviation, const MaybeTensor& weight,
                                 const MaybeTensor& bias, std::array<bool, 3> mask) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(normalized).vec();
  const auto of_parameters = at::empty(sizes, outline(given(weight) ? *weight : input).options());
  std::vector<at::Tensor> wanted{outline(input).contiguous(), of_parameters, of_parameters};
  for (std::size_t i = 0; i < 3; ++i) {
    if (!mask[i]) wanted[i] = at::Tensor();
  }
  auto kernel = [sizes, mask, g = twin(gradient), x = twin(input), m = twin(mean), d = twin(deviation),
                 w = twin(weight.value_or(at::Tensor())), b = twin(bias.value_or(at::Tensor()))] {
    auto [dx, dw, db] = at::native_layer_norm_backward(raised(g), raised(x), sizes, m, d, raised(w), raised(b), mask);
    return std::vector{lowered(dx, x), lowered(dw, x), lowered(db, x)};
  };
  const auto made = enqueue_kernel(input.device(), wanted, kernel);
  return {made[0], made[1], made[2]};
}

// Attention by its definition.
std::int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&, double, bool,
                              std::optional<double>, bool) {
  return 0;
}

// Cells of an LSTM and a GRU choose by themselves what they keep for their backwards.
Three lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
                const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (given(input_bias)) {
    gates = gates + *input_bias + *hidden_bias;
  }
  const auto parts = gates.chunk(4, 1);
  const auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

Three lstm_cell_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy, const at::Tensor& cx,
                         const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const auto &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const auto t = cy.tanh();
  const auto dh = or_zeros(grad_hy, cy);
  const auto dc = or_zeros(grad_cy, cy) + dh * o * (1 - t * t);
  const auto gates =
      at::cat({dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {gates, dc * f, has_bias ? gates.sum(0) : at::Tensor()};
}

Two gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto x = (given(input_bias) ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto h = (given(hidden_bias) ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hy,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const auto dz = grad_hy * (hx - n) * z * (1 - z);
  const auto dn = grad_hy * (1 - z) * (1 - n * n);
  const auto dr = dn * hn * r * (1 - r);
  const auto input = at::cat({dr, dz, dn}, 1), hidden = at::cat({dr, dz, dn * r}, 1);
  return {input, hidden, grad_hy * z, has_bias ? input.sum(0) : at::Tensor(), has_bias ? hidden.sum(0) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
  library.impl("native_layer_norm", native_layer_norm);
  library.impl("native_layer_norm_backward", native_layer_norm_backward);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
}  // namespace emulated
