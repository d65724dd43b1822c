// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "lamina/fused/rule.h"

namespace lamina::fused {

extern const Rule kSgd;       // torch.optim.SGD
extern const Rule kAdam;      // torch.optim.Adam
extern const Rule kAdamW;     // torch.optim.AdamW
extern const Rule kAdagrad;   // torch.optim.Adagrad
extern const Rule kAdadelta;  // torch.optim.Adadelta
extern const Rule kRmsProp;   // torch.optim.RMSprop
extern const Rule kRprop;     // torch.optim.Rprop
extern const Rule kAdamax;    // torch.optim.Adamax
extern const Rule kNAdam;     // torch.optim.NAdam
extern const Rule kRAdam;     // torch.optim.RAdam
extern const Rule kLamb;      // You et al., arxiv.org/abs/1904.00962, with the arguments of apex's FusedLAMB
extern const Rule kNovoGrad;  // Ginsburg et al., arxiv.org/abs/1905.11286, with those of apex's FusedNovoGrad
extern const Rule kQhm;       // Ma and Yarats, arxiv.org/abs/1810.06801

// Measures gradients and updates nothing.
extern const Rule kGradientNorm;

// Every kind that is an optimizer.
std::span<const Rule* const> rules();

}  // namespace lamina::fused
