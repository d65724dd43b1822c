// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/archive/store.h"
#include "lamina/base/error.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/tree_json.h"
#include "lamina/job_checkpoint/contents.h"
#include "lamina/session/peers.h"
#include "python/bindings/bindings.h"
#include "python/bindings/checkpointed_job.h"
#include "python/bindings/convert.h"
#include "python/bindings/saves.h"

// Checkpoints of files that Python makes, a pickle say, and that only their checksums are known of.
namespace lamina::python {
namespace {

using checkpoint::OwnFile;

// A file as Python writes it. What a write throws is kept: Python code between may say something else about it.
class OutputFile {
 public:
  explicit OutputFile(const OwnFile::Write& write) : write_(&write) {}

  std::size_t write(const py::buffer& data) {
    if (write_ == nullptr) throw base::UsageError("a write into a file of a checkpoint that was written");
    const auto info = data.request();
    const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
    const Release release;
    try {
      (*write_)({static_cast<const std::byte*>(info.ptr), bytes});
    } catch (...) {
      if (!error_) error_ = std::current_exception();
      throw;
    }
    return bytes;
  }
  void end() { write_ = nullptr; }
  std::exception_ptr error() const { return error_; }

 private:
  const OwnFile::Write* write_;
  std::exception_ptr error_;
};

// Calls a function of Python's with the file.
void make(const py::function& function, const OwnFile::Write& write) {
  const auto file = std::make_shared<OutputFile>(write);
  std::string problem;
  try {
    function(file);
  } catch (const py::error_already_set& error) {
    problem = error.what();
  }
  file->end();
  if (file->error()) std::rethrow_exception(file->error());
  if (!problem.empty()) throw base::UsageError(problem);
}

// `given`: goes with the lock of the interpreter, whoever lets go of it last.
OwnFile own_file(std::string name, std::int64_t bytes, py::function given) {
  const auto unlocked = [](py::function* function) {
    const py::gil_scoped_acquire lock;
    delete function;
  };
  std::shared_ptr<py::function> function(new py::function(std::move(given)), unlocked);
  return {std::move(name), bytes, [function](const OwnFile::Write& write) {
            const py::gil_scoped_acquire lock;
            make(*function, write);
          }};
}

// A save of files that this rank has, by name: about how many bytes, and what writes them.
SaveHolder begin_save_of_files(session::Session& session, py::object lent, const std::filesystem::path& folder,
                               const std::string& tag, const std::string& form, const py::dict& more,
                               std::vector<std::tuple<std::string, std::int64_t, py::function>> files,
                               std::size_t keep) {
  const PythonCheckpointedJob job(session, std::move(lent));
  checkpoint::SaveRequest request{.folder = folder, .tag = tag, .keep = keep};
  std::vector<at::Tensor> none;
  auto about = job_checkpoint::about_of(job);
  about.form = form;
  request.about = job_checkpoint::write_about(about, none, /*allow_objects=*/false);
  for (const auto& [key, value] : more) {
    request.about[key.cast<std::string>()] = checkpoint::to_json(to_value(value), none, false);
  }
  base::internal_check(none.empty(), "a tensor in what is said about files");
  for (auto& [name, bytes, function] : files) request.own_files.push_back(own_file(name, bytes, std::move(function)));
  const Release release;
  auto save =
      std::make_shared<checkpoint::Save>(archive::file_system(), std::move(request), session::peers_of(session));
  save->start();
  return SaveHolder(new SharedSave{std::move(save)});
}

}  // namespace

void bind_checkpoint_files(py::module_& module) {
  py::class_<OutputFile, std::shared_ptr<OutputFile>>(
      module, "OutputFile", "A file of a checkpoint that is being written, as torch.save takes it.")
      .def("write", &OutputFile::write, py::arg("data"))
      .def("flush", [](const OutputFile&) {});
  module.def(
      "begin_save_of_files", &begin_save_of_files, py::arg("session"), py::arg("job"), py::arg("folder"),
      py::arg("tag"), py::arg("form"), py::arg("more"), py::arg("files"), py::arg("keep"), py::keep_alive<0, 1>(),
      "Begins to save a job as files of another form, of which the manifest tells `more`. Of each that this rank has, "
      "`files` gives the name, about how many bytes, and a function that writes it in a thread of the save's.");
  module.def(
      "open_output",
      [](const std::string& path, int flags) {
        const Release release;
        return base::open_output(path, flags).release();
      },
      py::arg("path"), py::arg("flags"),
      "The descriptor of a file to write, opened with the flags of os.open: a regular file of this user with one name, "
      "and no link. FileError for anything else that others could have put there.");
}

}  // namespace lamina::python
