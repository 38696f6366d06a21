// A kernel's view of the custom call that XLA makes: operands by name, results, attributes, and errors if they do not fit.
#pragma once

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace neuronx {

namespace ffi = xla::ffi;

constexpr int64_t kAny = -1;  // a size that the first array with it determines

// In rows, all axes but the last count as one; or all after the first. Of each of a stack, the first does not count.
enum Axes { kApart, kInRows, kFirst, kOfEach };

using Types = std::initializer_list<ffi::DataType>;
using Sizes = std::initializer_list<int64_t*>;

// An operand or a result. An operand that is absent has no name.
struct Array {
  std::string_view name;
  ffi::DataType type = ffi::DataType::INVALID;
  ffi::Span<const int64_t> sizes;
  void* data = nullptr;
  Axes axes = kApart;

  explicit operator bool() const { return !name.empty(); }
  size_t Rank() const {
    if (axes == kOfEach) return sizes.size() > 0 ? sizes.size() - 1 : 0;
    return axes != kApart && sizes.size() > 0 ? 2 : sizes.size();
  }

  int64_t Size(size_t axis) const {
    if (axes == kApart) return sizes[axis];
    if (axes == kOfEach) return sizes[axis + 1];
    if (axes == kFirst) return axis ? Product(sizes.begin() + 1, sizes.end()) : sizes.front();
    return axis ? sizes.back() : Product(sizes.begin(), sizes.end() - 1);
  }

  // Bytes of each of a stack.
  int64_t Bytes() const { return sizes.size() ? Product(sizes.begin() + 1, sizes.end()) * ffi::ByteWidth(type) : 0; }

  template <typename Iterator>
  static int64_t Product(Iterator first, Iterator last) {
    return std::accumulate(first, last, int64_t{1}, std::multiplies<>());
  }

  template <typename Number>
  Number* As() const { return static_cast<Number*>(data); }
};

// What is wrong with a call. The handler returns it as an error, so it never reaches XLA as an exception.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Operands and results are read in order. Messages are written only for errors.
class Call {
 public:
  Call(const char* kernel, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
       const ffi::Dictionary& attributes)
      : kernel_(kernel), operands_(operands), results_(results), attributes_(attributes),
        names_(Attribute<std::string_view>("operands")) {}

  template <typename Value>
  Value Attribute(std::string_view name) const {
    const auto value = attributes_.get<Value>(name);
    if (value.has_error()) Refuse("attribute " + std::string(name) + " is missing or has another type");
    return *value;
  }

  // Whether the next operand has this name.
  bool Has(std::string_view name) const {
    const bool begins = names_.substr(0, name.size()) == name;
    return begins && (names_.size() == name.size() || names_[name.size()] == ' ');
  }

  // The next operand, which must have this name, one of these types, and these sizes.
  Array Operand(std::string_view name, Types types, Sizes sizes, Axes axes = kApart) {
    const Array array = Next(name, axes);
    Expect(array, types, sizes);
    return array;
  }

  // The same, but it may be absent.
  Array Optional(std::string_view name, Types types, Sizes sizes, Axes axes = kApart) {
    return Has(name) ? Operand(name, types, sizes, axes) : Array();
  }

  // The next operand, of any type and sizes.
  Array Next(std::string_view name, Axes axes = kApart) {
    if (!Has(name)) Refuse("the next operand must be " + std::string(name) + ", got " + NextName());
    if (read_ == operands_.size()) Refuse("operand " + std::string(name) + " is missing");
    names_.remove_prefix(std::min(names_.size(), name.size() + 1));
    Array array = Of(name, *operands_.get<ffi::AnyBuffer>(read_++));
    array.axes = axes;
    return array;
  }

  // The next result. The name is for messages.
  Array Result(std::string_view name, Types types, Sizes sizes, Axes axes = kApart) {
    if (written_ == results_.size()) Refuse("result " + std::string(name) + " is missing");
    Array array = Of(name, **results_.get<ffi::AnyBuffer>(written_++));
    array.axes = axes;
    Expect(array, types, sizes);
    return array;
  }

  void Expect(const Array& array, Types types, Sizes sizes) const {
    bool fits = array.Rank() == sizes.size() && std::find(types.begin(), types.end(), array.type) != types.end();
    for (size_t axis = 0; fits && axis < sizes.size(); ++axis) {
      const int64_t wanted = *sizes.begin()[axis];
      fits = wanted == kAny || wanted == array.Size(axis);
    }
    if (!fits) Refuse(array, Named(types) + Text(sizes.size(), [&](size_t axis) { return *sizes.begin()[axis]; }));
    for (size_t axis = 0; axis < sizes.size(); ++axis) *sizes.begin()[axis] = array.Size(axis);
  }

  void Must(bool holds, const Array& array, const char* be) const {
    if (!holds) Refuse(array, be);
  }

  void Must(bool holds, const char* be) const {
    if (!holds) Refuse(be);
  }

  // Says that all was read: nothing may be left.
  void Done() const {
    if (!names_.empty()) Refuse("there must be no operand " + NextName() + " here");
    if (read_ != operands_.size()) Refuse("operands must have names, got more operands than names");
    if (written_ != results_.size()) Refuse("there are more results than the kernel has");
  }

 private:
  static Array Of(std::string_view name, const ffi::AnyBuffer& buffer) {
    return {name, buffer.element_type(), buffer.dimensions(), buffer.untyped_data()};
  }

  std::string NextName() const { return names_.empty() ? "no more" : std::string(names_.substr(0, names_.find(' '))); }

  [[noreturn, gnu::cold, gnu::noinline]] void Refuse(const std::string& what) const {
    throw Refused(std::string(kernel_) + ": " + what);
  }

  [[noreturn, gnu::cold, gnu::noinline]] void Refuse(const Array& array, const std::string& wanted) const {
    const auto size = [&](size_t axis) { return array.Size(axis); };
    Refuse(std::string(array.name) + " must be " + wanted + ", got " + Named({array.type}) + Text(array.Rank(), size));
  }

  // As in "f32, bf16 or f16".
  [[gnu::cold]] static std::string Named(Types types) {
    std::ostringstream names;
    for (const ffi::DataType* type = types.begin(); type != types.end(); ++type)
      names << (type == types.begin() ? "" : type + 1 == types.end() ? " or " : ", ") << *type;
    std::string text = names.str();
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char letter) { return std::tolower(letter); });
    return text;
  }

  // As in "[2,?,64]".
  template <typename Size>
  [[gnu::cold]] static std::string Text(size_t rank, const Size& size) {
    std::string text = "[";
    for (size_t axis = 0; axis < rank; ++axis)
      text += (axis ? "," : "") + (size(axis) == kAny ? "?" : std::to_string(size(axis)));
    return text + "]";
  }

  const char* kernel_;
  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
  const ffi::Dictionary& attributes_;
  std::string_view names_;  // of the operands that are left, with spaces between
  size_t read_ = 0, written_ = 0;
};

}  // namespace neuronx
