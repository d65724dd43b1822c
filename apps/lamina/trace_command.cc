// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/trace_command.h"

#include <fcntl.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <filesystem>

#include "apps/lamina/embedded_script.h"
#include "apps/lamina/say.h"
#include "lamina/base/error.h"
#include "lamina/base/output_file.h"
#include "lamina/launch/options/command_line.h"
#include "lamina/observe/summary.h"
#include "lamina/observe/timeline_part.h"

namespace lamina::embedded {
extern const char* const kPicture;  // picture.py
}

namespace lamina::command {

int trace(const std::vector<std::string>& arguments) {
  CLI::App app("Says what the ranks of a job spent their time on, from its timeline.", "lamina trace");
  std::string path, output, picture;
  app.add_option("FILE", path,
                 "what `lamina run --timeline FILE` or lamina.timeline(FILE) wrote; or the folder FILE.XXXXXX, where a "
                 "launcher that was killed has left the parts of its ranks")
      ->required()
      ->type_name("");
  app.add_option("-o,--output", output, "write it there as a file for Perfetto")->type_name("FILE");
  app.add_option("--png", picture,
                 "draw the step with the median duration there, measured above planned; needs matplotlib")
      ->type_name("FILE");
  if (auto code = launch::parse(app, "lamina trace", arguments)) return *code;
  try {
    const bool parts = std::filesystem::is_directory(path);
    if (parts && output.empty() && !picture.empty()) throw base::Error("--png draws a file: write one, with -o FILE");
    if (!picture.empty() && !std::filesystem::path(picture).has_extension()) picture += ".png";
    const observe::Timeline timeline = parts ? observe::read_parts(path) : observe::read_file(path);
    if (timeline.ranks.empty()) throw base::Error("it is a folder in which no rank has left a timeline");
    if (!output.empty()) observe::write_file(timeline, output);
    say_text(observe::describe(observe::summarise(timeline)));
    if (picture.empty()) return 0;
    const auto place = base::open_output(picture, O_WRONLY);
    ::fcntl(place.get(), F_SETFD, 0);  // the script inherits it
    return become_script("lamina trace", embedded::kPicture,
                         {parts ? output : path, picture, std::to_string(place.get())});
  } catch (const base::Error& error) {
    complain("lamina trace: ", path, ": ", error.what());
    return 2;
  }
}

}  // namespace lamina::command
