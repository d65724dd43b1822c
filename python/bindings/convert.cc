// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/convert.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include "lamina/base/error.h"
#include "lamina/faces/sayings.h"
#include "python/bindings/hooks.h"

namespace lamina::python {
namespace {

using value::Value;

constexpr auto kPickle = "pickle";
constexpr int kMaxDepth = 500;  // as the encoding's: a deeper tree, or one that contains itself, is a mistake

Value convert(py::handle object, int depth);

template <class Items>
std::vector<Value> convert_all(const Items& items, int depth) {
  std::vector<Value> values;
  for (auto item : items) values.push_back(convert(item, depth));
  return values;
}

Value pack(py::handle object) {
  const auto [bytes, tensors] = hooks().pack(object).cast<std::pair<py::bytes, std::vector<at::Tensor>>>();
  return value::Opaque{kPickle, bytes, tensors};
}

Value convert_int(py::handle object) {
  int overflow = 0;
  const std::int64_t number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  return overflow != 0 ? pack(object) : Value(number);
}

Value convert_text(py::handle object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text != nullptr) return std::string(text, static_cast<std::size_t>(size));
  PyErr_Clear();  // lone surrogates: not UTF-8, but picklable
  return pack(object);
}

Value convert_dict(py::handle object, int depth) {
  value::Dict dict;
  for (auto [key, item] : py::reinterpret_borrow<py::dict>(object)) {
    dict.items.emplace_back(convert(key, depth), convert(item, depth));
  }
  return dict;
}

Value convert_slice(py::handle object, int depth) {
  return value::Slice{
      {convert(object.attr("start"), depth), convert(object.attr("stop"), depth), convert(object.attr("step"), depth)}};
}

Value convert(py::handle object, int depth) {
  if (depth > kMaxDepth) throw faces::refusal("too-deep", kMaxDepth);
  PyObject* const p = object.ptr();
  if (object.is_none()) return value::None{};
  if (THPVariable_CheckExact(p)) return THPVariable_Unpack(p);
  if (PyBool_Check(p)) return p == Py_True;
  if (PyLong_CheckExact(p)) return convert_int(object);
  if (PyFloat_CheckExact(p)) return PyFloat_AS_DOUBLE(p);
  if (PyUnicode_CheckExact(p)) return convert_text(object);
  if (PyTuple_CheckExact(p)) return value::Tuple{convert_all(py::reinterpret_borrow<py::tuple>(object), depth + 1)};
  if (PyList_CheckExact(p)) return value::List{convert_all(py::reinterpret_borrow<py::list>(object), depth + 1)};
  if (PyDict_CheckExact(p)) return convert_dict(object, depth + 1);
  if (THPDtype_Check(p)) return reinterpret_cast<THPDtype*>(p)->scalar_type;
  if (THPDevice_Check(p)) return reinterpret_cast<THPDevice*>(p)->device;
  if (PySlice_Check(p)) return convert_slice(object, depth + 1);
  return pack(object);
}

// One overload per kind of value.
struct ToObject {
  py::object operator()(value::None) const { return py::none(); }
  py::object operator()(bool flag) const { return py::bool_(flag); }
  py::object operator()(std::int64_t number) const { return py::int_(number); }
  py::object operator()(double number) const { return py::float_(number); }
  py::object operator()(const std::string& text) const { return py::str(text); }
  py::object operator()(const at::Tensor& tensor) const { return py::cast(tensor); }
  py::object operator()(const value::Reference&) const { throw base::InternalError("a reference reached Python"); }
  py::object operator()(at::ScalarType dtype) const { return py::cast(dtype); }
  py::object operator()(at::Device device) const { return py::cast(device); }
  py::object operator()(const value::Slice& slice) const {
    const auto bound = [&](int i) { return to_object(slice.bounds.at(i)); };
    PyObject* made = PySlice_New(bound(0).ptr(), bound(1).ptr(), bound(2).ptr());
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }
  py::object operator()(const value::List& list) const {
    py::list made(list.items.size());
    for (std::size_t i = 0; i < list.items.size(); ++i) made[i] = to_object(list.items[i]);
    return made;
  }
  py::object operator()(const value::Tuple& tuple) const {
    py::tuple made(tuple.items.size());
    for (std::size_t i = 0; i < tuple.items.size(); ++i) made[i] = to_object(tuple.items[i]);
    return made;
  }
  py::object operator()(const value::Dict& dict) const {
    py::dict made;
    for (const auto& [key, item] : dict.items) made[to_object(key)] = to_object(item);
    return made;
  }
  py::object operator()(const value::Opaque& opaque) const {
    if (opaque.codec != kPickle) throw base::FormatError("an object of the unknown codec \"" + opaque.codec + "\"");
    return hooks().unpack(py::bytes(opaque.bytes), py::cast(opaque.tensors));
  }
};

}  // namespace

value::Value to_value(py::handle object) { return convert(object, 0); }
py::object to_object(const value::Value& tree) { return std::visit(ToObject(), tree.variant()); }

}  // namespace lamina::python
