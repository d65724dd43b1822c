// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// How the launcher hands a rank what the environment alone must not hold: numbers of descriptors that it inherits.
namespace lamina::environment {

constexpr const char* kSecretVariable = "LAMINA_SECRET_FD";      // there the job's secret is read
constexpr const char* kProgressVariable = "LAMINA_PROGRESS_FD";  // there steps are reported, see ProgressReporter

constexpr const char* kDoorVariable = "LAMINA_DOOR_FD";       // there an elastic job says where newcomers join it
constexpr const char* kNewcomerVariable = "LAMINA_NEWCOMER";  // set where this process is one

constexpr const char* kElasticVariable = "LAMINA_ELASTIC";  // MIN[:MAX]: ranks outlive others while MIN are left

constexpr const char* kWitnessVariable = "LAMINA_WITNESS";  // HOST:PORT of the job's witness, where it has one

constexpr std::size_t kSecretBytes = 32;

}  // namespace lamina::environment
