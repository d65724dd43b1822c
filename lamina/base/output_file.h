// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/base/fd.h"

namespace lamina::base {

// Opens a file to write, and makes it if it is missing. Other users who may write to its folder can put anything in its
// place. So a file that is there has to be a regular one of this process's user, with no second name, and no link is
// followed. A device or a pipe loses nothing by a write: where only this user and root may write to its folder it is
// opened too, by a link as well.
//
// path: the file; its folder exists.
// flags: O_WRONLY or O_RDWR, perhaps with O_TRUNC, O_APPEND or O_EXCL.
// Throws FileError, which names the path and what lies there.
Fd open_output(const std::string& path, int flags);

// Throws FileError where open_output() could not open the file to write, before there is anything to write. What is
// missing of its folder is made; the file is not.
void require_output(const std::string& path);

// Makes a regular file hold `text` and nothing else, as open_output() opens it.
void write_output(const std::string& path, const std::string& text);

}  // namespace lamina::base
