// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// How the launcher hands a rank what the environment alone must not hold: numbers of descriptors that it inherits.
namespace lamina::environment {

constexpr const char* kSecretVariable = "LAMINA_SECRET_FD";      // there the job's secret is read
constexpr const char* kProgressVariable = "LAMINA_PROGRESS_FD";  // there steps are reported, see ProgressReporter

constexpr const char* kDoorVariable = "LAMINA_DOOR_FD";           // there is the DoorPlate of an elastic job
constexpr const char* kNewcomerVariable = "LAMINA_NEWCOMER";      // set where this process is one: see NewcomerTerms
constexpr const char* kSpareWaitVariable = "LAMINA_SPARE_WAIT";   // seconds that a newcomer waits for a place
constexpr const char* kDoorkeeperVariable = "LAMINA_DOORKEEPER";  // there its launcher tells where the door is

constexpr const char* kJoinEveryVariable = "LAMINA_JOIN_EVERY";  // seconds: ranks by hand join at most so often
constexpr const char* kElasticVariable = "LAMINA_ELASTIC";       // MIN[:MAX]: ranks outlive others while MIN are left

constexpr const char* kWitnessVariable = "LAMINA_WITNESS";  // HOST:PORT of the job's witness, where it has one

constexpr std::size_t kSecretBytes = 32;

}  // namespace lamina::environment
