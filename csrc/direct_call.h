// Calls of kernels past torch's dispatcher: Python's arguments, by DLPack's C interface to torch's tensors, as a
// library takes them (common/call.h). What is not as it was when the callable was made goes another way.
#pragma once

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/call.h"

namespace kvbackend {

namespace py = pybind11;

// torch's own interface, and the two types whose objects are plain tensors: subclasses may mean something else.
struct Torch {
  const DLPackExchangeAPI* api = nullptr;
  PyTypeObject *tensor = nullptr, *parameter = nullptr;
  PyObject *grad_enabled = nullptr, *requires_grad = nullptr;

  static const Torch& get() {
    static const Torch torch = [] {
      Torch found;
      const py::module_ module = py::module_::import("torch");
      const py::object tensor = module.attr("Tensor"), parameter = module.attr("nn").attr("Parameter");
      found.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
      found.parameter = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
      found.grad_enabled = py::object(module.attr("is_grad_enabled")).release().ptr();
      found.requires_grad = PyUnicode_InternFromString("requires_grad");
      if (!py::hasattr(tensor, "__dlpack_c_exchange_api__")) return found;
      const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
      const auto* api = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (!api) throw py::error_already_set();
      if (api->header.version.major == DLPACK_MAJOR_VERSION && api->dltensor_from_py_object_no_sync) found.api = api;
      return found;
    }();
    return torch;
  }

  // Whether torch may want gradients of results: its dispatcher tells then that there are none.
  bool wants_gradients() const { return holds(PyObject_CallNoArgs(grad_enabled)); }

  // False for what is no plain tensor in this process's memory, or one whose gradient is wanted.
  bool read(PyObject* object, bool gradients, DLTensor& found) const {
    if (Py_TYPE(object) != tensor && Py_TYPE(object) != parameter) return false;
    if (gradients && holds(PyObject_GetAttr(object, requires_grad))) return false;
    if (api->dltensor_from_py_object_no_sync(object, &found) == 0) return found.device.device_type == kDLCPU;
    PyErr_Clear();  // no storage, as in a transform of functions
    return false;
  }

 private:
  static bool holds(PyObject* truth) {  // also where there is none
    const bool holds = truth != Py_False;
    if (!truth) PyErr_Clear();
    Py_XDECREF(truth);
    return holds;
  }
};

inline ElementType element_of(const DLTensor& tensor) { return {tensor.dtype.code, tensor.dtype.bits}; }

// What a result is until torch lets go of it.
struct Owned {
  DLManagedTensorVersioned managed{};
  void* owner = nullptr;
  void (*release)(void*) = nullptr;
};

inline PyObject* to_python(const Result& result, void (*release)(void*)) {
  auto* owned = new Owned;
  owned->owner = result.owner;
  owned->release = release;
  DLManagedTensorVersioned& managed = owned->managed;
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.manager_ctx = owned;
  managed.deleter = [](DLManagedTensorVersioned* self) {
    auto* ended = static_cast<Owned*>(self->manager_ctx);
    ended->release(ended->owner);
    delete ended;
  };
  managed.dl_tensor.data = result.array.data;
  managed.dl_tensor.device = {kDLCPU, 0};
  managed.dl_tensor.ndim = result.array.dim;
  managed.dl_tensor.dtype = {result.array.dtype.code, result.array.dtype.bits, 1};
  managed.dl_tensor.shape = const_cast<int64_t*>(result.array.sizes);
  managed.dl_tensor.strides = const_cast<int64_t*>(result.array.strides);
  void* object = nullptr;
  if (Torch::get().api->managed_tensor_to_py_object_no_sync(&managed, &object) == 0)
    return static_cast<PyObject*>(object);
  managed.deleter(&managed);
  return nullptr;
}

// A parameter of an op. `kind`: t for a tensor, or the type of a number: i, b, f, s.
struct Parameter {
  PyObject* name;
  PyObject* standard;  // its default; nullptr: it has none
  char kind;
  PyObject* wanted;   // what a number must equal; nullptr: anything of its type
  bool none;          // of a tensor: it must be None
  ElementType dtype;  // else of this dtype
};

constexpr int kMostArguments = 32, kMostResults = 4;

class Call {  // the state of a callable
 public:
  std::vector<Parameter> parameters;
  DirectOp op;
  void (*release)(void*);

  // The result, or nullptr without an error where the call must go the other way.
  PyObject* operator()(PyObject* const* given, Py_ssize_t count, PyObject* names) const {
    PyObject* objects[kMostArguments] = {};
    DLTensor tensors[kMostArguments];
    Array arrays[kMostArguments];
    Value values[kMostArguments];
    if (!by_position(given, count, names, objects)) return nullptr;
    const bool gradients = Torch::get().wants_gradients();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!read(parameters[i], objects[i], gradients, tensors[i], arrays[i], values[i])) return nullptr;
    }
    Result results[kMostResults];
    bool done;
    Py_BEGIN_ALLOW_THREADS;
    done = op.entry(values, results);
    Py_END_ALLOW_THREADS;
    return done ? returned(results) : nullptr;
  }

 private:
  bool by_position(PyObject* const* given, Py_ssize_t count, PyObject* names, PyObject** objects) const {
    const auto all = static_cast<Py_ssize_t>(parameters.size());
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    if (count > all) return false;
    std::copy_n(given, count, objects);
    Py_ssize_t guess = count;  // names mostly come in order
    for (Py_ssize_t n = 0; n < named; ++n) {
      PyObject* name = PyTuple_GET_ITEM(names, n);
      Py_ssize_t tried = 0;
      for (; tried < all && parameters[guess % all].name != name; ++tried) ++guess;
      PyObject*& place = objects[guess % all];
      if (tried == all || place) return false;
      place = given[count + n];
      ++guess;
    }
    for (Py_ssize_t i = 0; i < all; ++i) {
      if (!objects[i]) objects[i] = parameters[i].standard;
      if (!objects[i]) return false;
    }
    return true;
  }

  static bool read(const Parameter& parameter, PyObject* object, bool gradients, DLTensor& tensor, Array& array,
                   Value& value) {
    if (parameter.wanted && parameter.wanted != object) {
      if (Py_TYPE(object) != Py_TYPE(parameter.wanted)) return false;
      const int equal = PyObject_RichCompareBool(object, parameter.wanted, Py_EQ);
      if (equal < 0) PyErr_Clear();
      if (equal != 1) return false;
    }
    switch (parameter.kind) {
      case 't':
        value.array = nullptr;
        if (parameter.none || object == Py_None) return parameter.none && object == Py_None;
        if (!Torch::get().read(object, gradients, tensor) || !(element_of(tensor) == parameter.dtype)) return false;
        array = {static_cast<char*>(tensor.data) + tensor.byte_offset, tensor.shape, tensor.strides, tensor.ndim,
                 parameter.dtype};
        value.array = &array;
        return true;
      case 'b':
        value.integer = object == Py_True;
        return PyBool_Check(object);
      case 'i':
        if (!PyLong_CheckExact(object)) return false;
        value.integer = PyLong_AsLongLong(object);
        break;
      case 'f':
        if (!PyFloat_CheckExact(object)) return false;
        value.number = PyFloat_AS_DOUBLE(object);
        return true;
      default:
        if (!PyUnicode_CheckExact(object)) return false;
        value.text = PyUnicode_AsUTF8(object);
    }
    if (!PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }

  PyObject* returned(const Result* results) const {
    if (op.results == 0) return Py_NewRef(Py_None);
    PyObject* made[kMostResults];
    bool failed = false;
    for (int i = 0; i < op.results; ++i) {
      made[i] = to_python(results[i], release);
      failed |= !made[i];
    }
    PyObject* whole = op.results == 1 ? made[0] : failed ? nullptr : PyTuple_New(op.results);
    if (op.results == 1) return whole;
    for (int i = 0; i < op.results; ++i) whole ? (void)PyTuple_SET_ITEM(whole, i, made[i]) : Py_XDECREF(made[i]);
    return whole;
  }
};

// ---------------------------------------------------------------------------------------------- its Python object

struct Callable {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* otherwise;  // who takes what does not fit; also who has the attributes
  Call* call;
};

inline PyObject* call_vector(PyObject* self, PyObject* const* given, size_t flags, PyObject* names) {
  const auto* callable = reinterpret_cast<Callable*>(self);
  PyObject* result = (*callable->call)(given, PyVectorcall_NARGS(flags), names);
  if (result || PyErr_Occurred()) return result;
  return PyObject_Vectorcall(callable->otherwise, given, flags, names);
}

inline PyObject* attribute(PyObject* self, PyObject* name) {
  PyObject* otherwise = reinterpret_cast<Callable*>(self)->otherwise;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(otherwise);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return Py_NewRef(Py_TYPE(self));
  return PyObject_GetAttr(otherwise, name);
}

inline void destroy(PyObject* self) {
  auto* callable = reinterpret_cast<Callable*>(self);
  for (const Parameter& parameter : callable->call->parameters) {
    Py_DECREF(parameter.name);
    Py_XDECREF(parameter.standard);
    Py_XDECREF(parameter.wanted);
  }
  delete callable->call;
  Py_XDECREF(callable->otherwise);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyTypeObject* callable_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"kvbackend._build.DirectCall", sizeof(Callable), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  return type;
}

// A callable of an op, or None where the library or this torch has no such way in.
//   ops         address of a library's kvbackend_direct_ops
//   parameters  (name, kind, wanted, standard) of each: `wanted` an example for a tensor, or None; for numbers `...`
//               where any will do; `standard` the default, `...` where there is none
//   otherwise   the Python callable for all that does not fit
inline py::object direct_call(uintptr_t ops, const std::string& name, const py::list& parameters,
                              py::object otherwise) {
  const Torch& torch = Torch::get();
  const DirectOps library = reinterpret_cast<DirectOps (*)()>(ops)();
  const DirectOp* op =
      std::find_if(library.ops, library.ops + library.count, [&](auto& each) { return each.name == name; });
  const auto count = static_cast<int>(parameters.size());
  if (!torch.api || op == library.ops + library.count) return py::none();
  if (op->arguments != count || count > kMostArguments || op->results > kMostResults) return py::none();
  PyTypeObject* type = callable_type();
  auto* callable = reinterpret_cast<Callable*>(type->tp_alloc(type, 0));
  if (!callable) throw py::error_already_set();
  callable->vectorcall = call_vector;
  callable->otherwise = otherwise.release().ptr();
  callable->call = new Call{{}, *op, library.release};
  const py::object made = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(callable));
  for (const py::handle& each : parameters) {
    const auto parts = each.cast<py::tuple>();
    Parameter parameter{};
    parameter.kind = parts[1].cast<std::string>().at(0);
    const py::object wanted = parts[2], standard = parts[3];
    if (parameter.kind != 't') {
      parameter.wanted = wanted.is(py::ellipsis()) ? nullptr : wanted.inc_ref().ptr();
    } else if (!(parameter.none = wanted.is_none())) {
      DLTensor tensor;
      if (!torch.read(wanted.ptr(), false, tensor)) return py::none();
      parameter.dtype = element_of(tensor);
    }
    parameter.standard = standard.is(py::ellipsis()) ? nullptr : standard.inc_ref().ptr();
    parameter.name = py::object(parts[0]).inc_ref().ptr();
    PyUnicode_InternInPlace(&parameter.name);
    callable->call->parameters.push_back(parameter);
  }
  return made;
}

}  // namespace kvbackend
