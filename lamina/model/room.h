// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "lamina/model/parameter_table.h"

// Memory of a model's values while these are elsewhere, and where they are to come.
namespace lamina::model {

// Releases all rows, wherever they are, and leaves their memory to whoever else has it: their values are elsewhere for
// a while, as `why` says behind the name of each. Slices are wholes from then on.
void put_aside(const ParameterTable& table, const std::string& why);

// Gives rows here that were released memory again, whose values are to come.
void make_room(const ParameterTable& table, std::span<const Parameter> rows);

}  // namespace lamina::model
