// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "lamina/fused/rules.h"

namespace lamina::fused {

using Values = std::vector<double>;
using Given = std::map<std::string, double>;

// An optimizer written out as its definition has it, one parameter and one number at a time, in double.
struct Reference {
  Given h;  // all hyper-parameters
  double gradient_norm = 0;
  Values m, v, most;
  double t = 0, number = 0;

  void sgd(Values& p, const Values& g) {
    const double maximize = h["maximize"], weight_decay = h["weight_decay"], momentum = h["momentum"],
                 dampening = h["dampening"], nesterov = h["nesterov"];
    const bool first = m.empty();
    m.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      double d = (maximize != 0 ? -g[i] : g[i]) + weight_decay * p[i];
      if (momentum != 0) {
        m[i] = first ? d : momentum * m[i] + (1 - dampening) * d;
        d = nesterov != 0 ? d + momentum * m[i] : m[i];
      }
      p[i] -= h["lr"] * d;
    }
  }

  void adam(Values& p, const Values& g, bool decoupled) {
    const double maximize = h["maximize"], lr = h["lr"], weight_decay = h["weight_decay"];
    ++t;
    m.resize(p.size()), v.resize(p.size()), most.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      double d = maximize != 0 ? -g[i] : g[i];
      if (decoupled) {
        p[i] -= lr * weight_decay * p[i];
      } else {
        d += weight_decay * p[i];
      }
      average(m[i], d, h["beta1"]);
      average(v[i], d * d, h["beta2"]);
      most[i] = std::max(most[i], v[i]);
      const double second = (h["amsgrad"] != 0 ? most[i] : v[i]) / (1 - std::pow(h["beta2"], t));
      p[i] -= h["lr"] * (m[i] / (1 - std::pow(h["beta1"], t))) / (std::sqrt(second) + h["eps"]);
    }
  }

  void adagrad(Values& p, const Values& g) {
    const double initial_accumulator_value = h["initial_accumulator_value"], maximize = h["maximize"],
                 weight_decay = h["weight_decay"], lr = h["lr"], lr_decay = h["lr_decay"], eps = h["eps"];
    ++t;
    if (v.empty()) v.assign(p.size(), initial_accumulator_value);
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = (maximize != 0 ? -g[i] : g[i]) + weight_decay * p[i];
      v[i] += d * d;
      p[i] -= lr / (1 + (t - 1) * lr_decay) * d / (std::sqrt(v[i]) + eps);
    }
  }

  void adadelta(Values& p, const Values& g) {
    const double lr = h["lr"], rho = h["rho"], eps = h["eps"], weight_decay = h["weight_decay"];
    m.resize(p.size()), v.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = (h["maximize"] != 0 ? -g[i] : g[i]) + weight_decay * p[i];
      average(v[i], d * d, rho);
      const double delta = std::sqrt(m[i] + eps) / std::sqrt(v[i] + eps) * d;
      average(m[i], delta * delta, rho);
      p[i] -= lr * delta;
    }
  }

  void rmsprop(Values& p, const Values& g) {
    const double lr = h["lr"], alpha = h["alpha"], eps = h["eps"], momentum = h["momentum"];
    m.resize(p.size()), v.resize(p.size()), most.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = (h["maximize"] != 0 ? -g[i] : g[i]) + h["weight_decay"] * p[i];
      average(v[i], d * d, alpha);
      average(most[i], d, alpha);
      const double variance = h["centered"] != 0 ? v[i] - most[i] * most[i] : v[i];
      m[i] = momentum * m[i] + d / (std::sqrt(variance) + eps);
      p[i] -= lr * m[i];
    }
  }

  void rprop(Values& p, const Values& g) {
    m.resize(p.size());
    if (v.empty()) v.assign(p.size(), h["lr"]);
    for (std::size_t i = 0; i < p.size(); ++i) {
      double d = h["maximize"] != 0 ? -g[i] : g[i];
      if (d * m[i] > 0) v[i] = std::min(v[i] * h["etaplus"], h["step_size_max"]);
      if (d * m[i] < 0) {
        v[i] = std::max(v[i] * h["etaminus"], h["step_size_min"]);
        d = 0;
      }
      if (d > 0) p[i] -= v[i];
      if (d < 0) p[i] += v[i];
      m[i] = d;
    }
  }

  void adamax(Values& p, const Values& g) {
    const double lr = h["lr"], beta1 = h["beta1"], beta2 = h["beta2"], eps = h["eps"];
    ++t;
    m.resize(p.size()), v.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = (h["maximize"] != 0 ? -g[i] : g[i]) + h["weight_decay"] * p[i];
      average(m[i], d, beta1);
      v[i] = std::max(beta2 * v[i], std::abs(d) + eps);
      p[i] -= lr / (1 - std::pow(beta1, t)) * m[i] / v[i];
    }
  }

  void nadam(Values& p, const Values& g) {
    const double lr = h["lr"], beta1 = h["beta1"], beta2 = h["beta2"], eps = h["eps"];
    const double decay = h["momentum_decay"];
    ++t;
    if (t == 1) number = 1;
    const double mu = beta1 * (1 - 0.5 * std::pow(0.96, t * decay));
    const double next = beta1 * (1 - 0.5 * std::pow(0.96, (t + 1) * decay));
    number *= mu;
    m.resize(p.size()), v.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = decayed(p[i], g[i]);
      average(m[i], d, beta1);
      average(v[i], d * d, beta2);
      const double denominator = std::sqrt(v[i] / (1 - std::pow(beta2, t))) + eps;
      p[i] -= lr * (1 - mu) / (1 - number) * d / denominator;
      p[i] -= lr * next / (1 - number * next) * m[i] / denominator;
    }
  }

  void radam(Values& p, const Values& g) {
    const double lr = h["lr"], beta1 = h["beta1"], beta2 = h["beta2"], eps = h["eps"];
    ++t;
    const double correction1 = 1 - std::pow(beta1, t), correction2 = 1 - std::pow(beta2, t);
    const double rho_inf = 2 / (1 - beta2) - 1, rho = rho_inf - 2 * t * std::pow(beta2, t) / correction2;
    m.resize(p.size()), v.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = decayed(p[i], g[i]);
      average(m[i], d, beta1);
      average(v[i], d * d, beta2);
      double rate = 1;
      if (rho > 5) {
        const double rectified = std::sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho));
        rate = rectified * std::sqrt(correction2) / (std::sqrt(v[i]) + eps);
      }
      p[i] -= lr * m[i] / correction1 * rate;
    }
  }

  void qhm(Values& p, const Values& g) {
    const double weight_decay_type = h["weight_decay_type"], weight_decay = h["weight_decay"], lr = h["lr"];
    m.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      double d = g[i];
      if (weight_decay_type == 0) {
        d += weight_decay * p[i];
      } else {
        p[i] *= 1 - lr * weight_decay;
      }
      average(m[i], d, h["momentum"]);
      p[i] -= h["lr"] * (h["nu"] * m[i] + (1 - h["nu"]) * d);
    }
  }

  void lamb(Values& p, const Values& g) {
    const double max_grad_norm = h["max_grad_norm"], grad_averaging = h["grad_averaging"], beta1 = h["beta1"],
                 bias_correction = h["bias_correction"], adam_w_mode = h["adam_w_mode"],
                 weight_decay = h["weight_decay"], beta2 = h["beta2"], eps = h["eps"];
    ++t;
    m.resize(p.size()), v.resize(p.size());
    const bool clips = max_grad_norm > 0 && gradient_norm > max_grad_norm;
    const double clipped = clips ? gradient_norm / max_grad_norm : 1;
    const double beta3 = grad_averaging != 0 ? 1 - beta1 : 1;
    const bool corrects = bias_correction != 0, decoupled = adam_w_mode != 0;
    Values update(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double d = g[i] / clipped + (decoupled ? 0 : weight_decay * p[i]);
      m[i] = beta1 * m[i] + beta3 * d;
      average(v[i], d * d, beta2);
      const double first = corrects ? m[i] / (1 - std::pow(beta1, t)) : m[i];
      const double second = corrects ? v[i] / (1 - std::pow(beta2, t)) : v[i];
      update[i] = first / (std::sqrt(second) + eps) + (decoupled ? weight_decay * p[i] : 0);
    }
    double ratio = h["lr"];
    if (h["use_nvlamb"] != 0 || h["weight_decay"] != 0) {
      const double of_p = norm(p), of_update = norm(update);
      if (of_p != 0 && of_update != 0) ratio *= of_p / of_update;
    }
    for (std::size_t i = 0; i < p.size(); ++i) p[i] -= ratio * update[i];
  }

  void novograd(Values& p, const Values& g) {
    const double grad_averaging = h["grad_averaging"], beta1 = h["beta1"], norm_type = h["norm_type"];
    ++t;
    m.resize(p.size());
    const double beta3 = grad_averaging != 0 ? 1 - beta1 : 1;
    const bool largest = norm_type == 0;
    double now = norm(g);
    if (largest) {
      now = 0;
      for (const double d : g) now = std::max(now, std::abs(d));
    }
    if (t == 1 && h["init_zero"] == 0) number = now;
    number = largest ? h["beta2"] * number + (1 - h["beta2"]) * now
                     : std::sqrt(h["beta2"] * number * number + (1 - h["beta2"]) * now * now);
    const double correction1 = h["bias_correction"] != 0 ? 1 - std::pow(h["beta1"], t) : 1;
    const double correction2 = h["bias_correction"] != 0 ? std::sqrt(1 - std::pow(h["beta2"], t)) : 1;
    const double denominator = number / correction2 + h["eps"];
    for (std::size_t i = 0; i < p.size(); ++i) {
      if (h["reg_inside_moment"] != 0) {
        m[i] = h["beta1"] * m[i] + beta3 * (g[i] / denominator + h["weight_decay"] * p[i]);
        p[i] -= h["lr"] * m[i] / correction1;
      } else {
        m[i] = h["beta1"] * m[i] + beta3 * g[i];
        p[i] -= h["lr"] * (m[i] / correction1 / denominator + h["weight_decay"] * p[i]);
      }
    }
  }

  void step(const std::string& name, Values& p, const Values& g) {
    if (name == "SGD") return sgd(p, g);
    if (name == "Adam") return adam(p, g, false);
    if (name == "AdamW") return adam(p, g, true);
    if (name == "Adagrad") return adagrad(p, g);
    if (name == "Adadelta") return adadelta(p, g);
    if (name == "RMSprop") return rmsprop(p, g);
    if (name == "Rprop") return rprop(p, g);
    if (name == "Adamax") return adamax(p, g);
    if (name == "NAdam") return nadam(p, g);
    if (name == "RAdam") return radam(p, g);
    if (name == "QHM") return qhm(p, g);
    if (name == "LAMB") return lamb(p, g);
    return novograd(p, g);
  }

 private:
  static void average(double& of, double value, double beta) { of = beta * of + (1 - beta) * value; }
  // The gradient with decay, which is taken of the parameter or added.
  double decayed(double& p, double g) {
    const double d = h["maximize"] != 0 ? -g : g, decay = h["weight_decay"];
    if (h["decoupled_weight_decay"] == 0) return d + decay * p;
    p *= 1 - h["lr"] * decay;
    return d;
  }
  static double norm(const Values& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }
};

// A rule with some of its hyper-parameters.
struct Sample {
  const Rule* rule;
  std::string label;
  Given given;
};

inline std::vector<double> hyper_of(const Sample& sample) {
  std::vector<std::pair<std::string_view, HyperValue>> given;
  for (const auto& [name, value] : sample.given) given.emplace_back(name, value);
  return hyper_values(sample.rule->declaration, given);
}

inline Reference reference_of(const Sample& sample) {
  Reference reference;
  const auto hyper = hyper_of(sample);
  for (std::size_t i = 0; i < hyper.size(); ++i) reference.h[sample.rule->declaration.hyper[i].name] = hyper[i];
  return reference;
}

// Each rule with each of its flags.
inline std::vector<Sample> samples() {
  const Given decay{{"weight_decay", 0.1}};
  const auto with = [](Given given, const Given& more) {
    given.insert(more.begin(), more.end());
    return given;
  };
  const Given momentum{{"lr", 0.05}, {"momentum", 0.9}};
  const Given qhm{{"lr", 0.05}, {"momentum", 0.9}, {"nu", 0.7}};
  return {{&kSgd, "Plain", {{"lr", 0.05}}},
          {&kSgd, "DecayMaximize", {{"lr", 0.05}, {"weight_decay", 0.1}, {"maximize", 1}}},
          {&kSgd, "Momentum", momentum},
          {&kSgd, "Dampening", with(momentum, {{"dampening", 0.3}, {"weight_decay", 0.1}})},
          {&kSgd, "Nesterov", with(momentum, {{"nesterov", 1}, {"maximize", 1}})},
          {&kAdam, "Plain", {}},
          {&kAdam, "Decay", decay},
          {&kAdam, "AmsgradMaximize", {{"amsgrad", 1}, {"maximize", 1}, {"weight_decay", 0.1}, {"beta2", 0.5}}},
          {&kAdamW, "Plain", {}},
          {&kAdamW, "NoFirstAverage", {{"beta1", 0}, {"eps", 1e-4}}},
          {&kAdamW, "AmsgradMaximize", {{"amsgrad", 1}, {"maximize", 1}, {"lr", 0.1}, {"beta2", 0.5}}},
          {&kAdagrad, "Plain", {}},
          {&kAdagrad,
           "All",
           {{"lr_decay", 0.1}, {"weight_decay", 0.1}, {"initial_accumulator_value", 0.5}, {"maximize", 1}}},
          {&kAdadelta, "Plain", {}},
          {&kAdadelta, "All", {{"rho", 0.7}, {"weight_decay", 0.1}, {"maximize", 1}, {"eps", 1e-3}}},
          {&kRmsProp, "Plain", {}},
          {&kRmsProp, "Momentum", {{"momentum", 0.9}, {"weight_decay", 0.1}, {"lr", 1e-3}}},
          {&kRmsProp, "Centered", {{"centered", 1}, {"maximize", 1}, {"eps", 1e-2}}},
          {&kRmsProp, "Both", {{"centered", 1}, {"momentum", 0.5}, {"eps", 1e-2}}},
          {&kRprop, "Plain", {}},
          {&kRprop, "Bounded", {{"step_size_max", 0.02}, {"step_size_min", 5e-3}, {"maximize", 1}}},
          {&kAdamax, "Plain", {}},
          {&kAdamax, "All", {{"weight_decay", 0.1}, {"maximize", 1}, {"beta2", 0.5}}},
          {&kNAdam, "Plain", {}},
          {&kNAdam, "Decay", {{"weight_decay", 0.1}, {"maximize", 1}, {"momentum_decay", 0.1}}},
          {&kNAdam, "Decoupled", {{"weight_decay", 0.1}, {"decoupled_weight_decay", 1}}},
          {&kRAdam, "Plain", {}},
          {&kRAdam, "Decay", {{"weight_decay", 0.1}, {"maximize", 1}, {"beta2", 0.9}}},
          {&kRAdam, "Decoupled", {{"weight_decay", 0.1}, {"decoupled_weight_decay", 1}}},
          {&kQhm, "Plain", qhm},
          {&kQhm, "Grad", with(qhm, decay)},
          {&kQhm, "Direct", with(qhm, {{"weight_decay", 0.1}, {"weight_decay_type", 1}})},
          {&kLamb, "Plain", {}},
          {&kLamb, "Unclipped", {{"max_grad_norm", 0}, {"bias_correction", 0}}},
          {&kLamb, "L2", {{"adam_w_mode", 0}, {"grad_averaging", 0}}},
          {&kLamb, "NoDecay", {{"weight_decay", 0}}},
          {&kLamb, "Nvlamb", {{"weight_decay", 0}, {"use_nvlamb", 1}}},
          {&kNovoGrad, "Plain", {{"lr", 0.05}}},
          {&kNovoGrad, "InsideMoment", {{"reg_inside_moment", 1}, {"weight_decay", 0.1}, {"lr", 0.05}}},
          {&kNovoGrad, "InitZero", {{"init_zero", 1}, {"weight_decay", 0.1}, {"grad_averaging", 0}}},
          {&kNovoGrad, "Largest", {{"norm_type", 0}, {"bias_correction", 0}, {"beta2", 0.5}}}};
}

}  // namespace lamina::fused
