// SPDX-License-Identifier: Apache-2.0
// Does not compile, and says why: a Child is called with what cannot pass between ranks.
#include <torch/torch.h>

#include "lamina/lamina.h"

struct Mine {};
struct InnerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const Mine&) { return x; }
};
TORCH_MODULE(Inner);

at::Tensor call(const lamina::Child<Inner>& inner, const at::Tensor& x) { return inner(x, Mine()); }
