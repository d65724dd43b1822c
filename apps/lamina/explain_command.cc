// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/explain_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <optional>
#include <regex>
#include <sstream>

#include "apps/lamina/say.h"
#include "lamina/base/edit_distance.h"
#include "lamina/launch/options/command_line.h"

namespace lamina::embedded {
extern const char* const kErrorsPage;  // docs/errors.md
}

namespace lamina::command {
namespace {

// A row of the page's tables: that of a code has five cells, that of a type three.
struct CodeRow {
  std::string section;
  std::vector<std::string> cells;

  std::string name() const {  // `Name` of "`Name` (a `Base`)"
    const auto& cell = cells.front();
    return cell.substr(1, cell.find('`', 1) - 1);
  }
};

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  for (std::size_t begin = 2; begin < line.size();) {
    const auto end = std::min(line.find(" |", begin), line.size());
    cells.push_back(line.substr(begin, end - begin));
    begin = end + 3;
  }
  return cells;
}

std::vector<CodeRow> rows() {
  std::vector<CodeRow> found;
  std::istringstream page(embedded::kErrorsPage);
  for (std::string line, section; std::getline(page, line);) {
    if (line.starts_with("## ")) section = line.substr(3);
    if (line.starts_with("| `")) found.push_back({section, cells_of(line)});
  }
  return found;
}

// A cell without what Markdown adds for links.
std::string plain(const std::string& cell) {
  static const std::regex link(R"(\[([^\]]+)\]\(([^)]+)\))");
  return std::regex_replace(cell, link, "$1 ($2)");
}

std::string described(const CodeRow& row) {
  std::vector<const char*> titles = {"by", "do"};
  if (row.cells.size() == 5) titles = {"type", "says", "when", "do"};
  std::string text = plain(row.cells.front()) + (row.section.empty() ? "" : "  [" + row.section + "]") + "\n";
  for (std::size_t i = 0; i < titles.size(); ++i) {
    const std::string title = titles[i];
    text += "  " + title + std::string(6 - title.size(), ' ') + plain(row.cells[i + 1]) + "\n";
  }
  return text;
}

std::string all_names(const std::vector<CodeRow>& rows) {
  std::string text, section = "-";
  for (const CodeRow& row : rows) {
    if (row.section != section)
      text += (text.empty() ? "" : "\n") + (row.section.empty() ? "Types" : row.section) + "\n";
    section = row.section;
    text += "  " + row.name() + "\n";
  }
  return text;
}

}  // namespace

int explain(const std::vector<std::string>& arguments) {
  CLI::App app("Says when an error with this code comes, and what to do.", "lamina explain");
  std::string asked;
  app.add_option(
         "CODE", asked,
         "the word in brackets at the end of an error's first line, or an error's type; without it, all are listed")
      ->type_name("");
  if (auto code = launch::parse(app, "lamina explain", arguments)) return *code;
  if (asked.starts_with('[') && asked.ends_with(']')) asked = asked.substr(1, asked.size() - 2);

  const auto known = rows();
  if (asked.empty()) {
    say_text(all_names(known));
    return 0;
  }
  const auto row = std::ranges::find(known, asked, &CodeRow::name);
  if (row != known.end()) {
    say_text(described(*row));
    return 0;
  }
  complain("lamina explain: no code or type ", asked, "; the nearest is ",
           base::nearest(known, asked, &CodeRow::name).name(), ", and without an argument all are listed");
  return 2;
}

}  // namespace lamina::command
