// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// A tree in which modules that run anywhere cost nothing: their calls run where their argument lies, so that what each
// takes counts with the module that worked before it.
ModuleTree settled(ModuleTree tree);

}  // namespace lamina::plan
