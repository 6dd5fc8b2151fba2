/* Chooses random regions of JPEGs and decodes only these with libjpeg-turbo, for
   image_preprocessing.py: many files per call, without Python's lock. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "expected libjpeg-turbo 2.1 or newer, which decodes the same pixels as simplejpeg"
#endif

#define TEXT(number) #number
#define VERSION(number) TEXT(number)

/* Extra columns on each side of the region, because smooth chroma upsampling reads neighbors. */
#define MARGIN 16

typedef struct {
  struct jpeg_error_mgr base;
  jmp_buf out;
} Errors;

static void leave(j_common_ptr info) { longjmp(((Errors *)info->err)->out, 1); }

/* Levels below 0 are warnings about damage, for which libjpeg would still return pixels. */
static void on_message(j_common_ptr info, int level) {
  if (level < 0) leave(info);
}

/* The caller sets `errors->out`. */
static struct jpeg_error_mgr *prepare_errors(Errors *errors) {
  jpeg_std_error(&errors->base);
  errors->base.error_exit = leave;
  errors->base.emit_message = on_message;
  return &errors->base;
}

typedef struct {
  int height, width, orientation;
} Header;

/* A part of a stored image, in pixels of the image reduced by `reduction`. Damage below the region
   is detected only if `to_end` is set. A region of zeros could not be found. */
typedef struct {
  int top, left, rows, columns, reduction, to_end, orientation;
} Region;

/* The fields of InceptionCrop, the size of the result, and what an image may be. */
typedef struct {
  double area[2], aspect[2];
  int height, width, reduced, exif_rotation;
  double max_pixels;
} Crop;

/* Starts to read a file; leaves if libraries convert its colors differently. */
static void open_file(struct jpeg_decompress_struct *info, const Py_buffer *stored) {
  jpeg_mem_src(info, stored->buf, (unsigned long)stored->len);
  jpeg_read_header(info, TRUE);
  J_COLOR_SPACE kind = info->jpeg_color_space;
  int plain = kind == JCS_YCbCr || kind == JCS_GRAYSCALE || kind == JCS_RGB;
  if (!plain || info->data_precision != 8) leave((j_common_ptr)info);
}

static unsigned read_number(const JOCTET *bytes, int count, int is_big) {
  unsigned number = 0;
  for (int i = 0; i < count; i++) number |= (unsigned)bytes[i] << 8 * (is_big ? count - 1 - i : i);
  return number;
}

enum { UNUSUAL = 0, MISSING = -1 }; /* instead of an orientation, 1 to 8 */

/* Returns the orientation in EXIF, or UNUSUAL if it has another form or Pillow would stop at an
   entry. */
static int read_exif(const JOCTET *tiff, unsigned length) {
  if (length < 10) return UNUSUAL;
  int is_big = memcmp(tiff, "MM\0*", 4) == 0;
  if (!is_big && memcmp(tiff, "II*\0", 4) != 0) return UNUSUAL;
  unsigned start = read_number(tiff + 4, 4, is_big);
  if (start < 8 || start > length - 2) return UNUSUAL;
  unsigned count = read_number(tiff + start, 2, is_big);
  if (count > (length - start - 2) / 12) return UNUSUAL;
  static const unsigned char sizes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4}; /* of types */
  int orientation = MISSING;
  for (unsigned i = 0; i < count; i++) {
    const JOCTET *entry = tiff + start + 2 + 12 * i;
    unsigned tag = read_number(entry, 2, is_big);
    unsigned type = read_number(entry + 2, 2, is_big);
    unsigned number = read_number(entry + 4, 4, is_big);
    unsigned value = read_number(entry + 8, 4, is_big);
    if (type == 0 || type >= sizeof(sizes) || number > length) return UNUSUAL;
    unsigned bytes = sizes[type] * number;
    if (bytes > 4 && (bytes > length || value > length - bytes)) return UNUSUAL;
    if (tag != 0x0112) continue;
    if (orientation != MISSING || type != 3 || number != 1) return UNUSUAL;
    orientation = read_number(entry + 8, 2, is_big);
    if (orientation < 1 || orientation > 8) return UNUSUAL;
  }
  return orientation;
}

static int contains(const JOCTET *bytes, unsigned length, const char *word) {
  unsigned size = strlen(word);
  for (unsigned i = 0; i + size <= length; i++)
    if (memcmp(bytes + i, word, size) == 0) return 1;
  return 0;
}

/* Returns the orientation of a file, or UNUSUAL. As in Pillow, XMP counts only if EXIF states no
   orientation. */
static int read_orientation(jpeg_saved_marker_ptr marker) {
  int orientation = MISSING, exif_count = 0, in_xmp = 0;
  for (; marker != NULL; marker = marker->next) {
    if (marker->data_length > 6 && memcmp(marker->data, "Exif\0\0", 6) == 0) {
      orientation = read_exif(marker->data + 6, marker->data_length - 6);
      exif_count++;
    } else if (contains(marker->data, marker->data_length, "Orientation")) {
      in_xmp = 1;
    }
  }
  if (exif_count > 1) return UNUSUAL;
  if (orientation == MISSING) return in_xmp ? UNUSUAL : 1;
  return orientation;
}

/* Returns zeros if the file is damaged or unusual; Python then reads it. */
static Header read_header(const Py_buffer *stored) {
  struct jpeg_decompress_struct info;
  Errors errors;
  info.err = prepare_errors(&errors);
  if (setjmp(errors.out)) {
    jpeg_destroy_decompress(&info);
    return (Header){0, 0, 0};
  }
  jpeg_create_decompress(&info);
  jpeg_save_markers(&info, JPEG_APP0 + 1, 0xFFFF);
  open_file(&info, stored);
  int orientation = read_orientation(info.marker_list);
  if (orientation == UNUSUAL) leave((j_common_ptr)&info);
  Header header = {info.image_height, info.image_width, orientation};
  jpeg_destroy_decompress(&info);
  return header;
}

/* The numbers of sampling.draw_uniform. */
static double draw_uniform(uint64_t key, uint64_t index) {
  uint64_t state = key + (index + 1) * 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return (double)((state ^ (state >> 31)) >> 11) * 0x1p-53;
}

/* The rule of InceptionCrop.region, with equal results. */
static Region draw_region(const Crop *crop, uint64_t key, int height, int width) {
  const double *area = crop->area, *aspects = crop->aspect;
  for (uint64_t first = 0; first < 400; first += 4) {
    double ratio = draw_uniform(key, first), size = draw_uniform(key, first + 1);
    double aspect = aspects[0] + ratio * (aspects[1] - aspects[0]);
    double low = rint(sqrt(area[0] * height * width / aspect));
    double high = rint(sqrt(area[1] * height * width / aspect));
    high = fmin(fmin(high, height), floor((width + 0.5) / aspect));
    double rows = fmin(low, high) + floor(size * (fmax(0, high - low) + 1));
    double columns = rint(rows * aspect);
    double share = rows * columns / ((double)height * width);
    if (columns > width || share < area[0] || share > area[1]) continue;
    double top = floor(draw_uniform(key, first + 2) * (height - rows + 1));
    double left = floor(draw_uniform(key, first + 3) * (width - columns + 1));
    return (Region){.top = top, .left = left, .rows = rows, .columns = columns};
  }
  return (Region){.rows = height, .columns = width};
}

/* Returns whether scans of a progressive file are missing. libjpeg then smooths between blocks, which
   depends on its version. */
static int lacks_scans(const struct jpeg_decompress_struct *info) {
  if (info->coef_bits == NULL) return 0;
  for (int component = 0; component < info->num_components; component++)
    for (int i = 0; i < DCTSIZE2; i++)
      if (info->coef_bits[component][i] != 0) return 1;
  return 0;
}

static int ceil_divide(int pixels, int reduction) { return (pixels + reduction - 1) / reduction; }

/* Converts a region of an upright image to the stored, reduced image. */
static Region to_stored(Region region, int height, int width, int orientation, int reduction) {
  int top = region.top / reduction, left = region.left / reduction;
  int rows = ceil_divide(region.top + region.rows, reduction) - top;
  int columns = ceil_divide(region.left + region.columns, reduction) - left;
  int rows_reversed = orientation == 3 || orientation == 4 || orientation >= 7;
  int columns_reversed = orientation == 2 || orientation == 3 || orientation == 6 ||
                         orientation == 7;
  if (rows_reversed) top = ceil_divide(height, reduction) - top - rows;
  if (columns_reversed) left = ceil_divide(width, reduction) - left - columns;
  Region stored = {.reduction = reduction, .orientation = orientation};
  int is_transposed = orientation >= 5;
  stored.top = is_transposed ? left : top;
  stored.left = is_transposed ? top : left;
  stored.rows = is_transposed ? columns : rows;
  stored.columns = is_transposed ? rows : columns;
  return stored;
}

static Region find_region(const Py_buffer *stored, uint64_t key, const Crop *crop) {
  Header header = read_header(stored);
  double pixels = (double)header.height * header.width;
  if (pixels == 0 || pixels > crop->max_pixels) return (Region){0};
  int orientation = crop->exif_rotation ? header.orientation : 1;
  int height = orientation >= 5 ? header.width : header.height;
  int width = orientation >= 5 ? header.height : header.width;
  Region region = draw_region(crop, key, height, width);
  int reduction = crop->reduced ? 8 : 1; /* leaves 2 x 2 pixels for each pixel of the result */
  while (reduction > 1 && (region.rows / (2 * crop->height) < reduction ||
                           region.columns / (2 * crop->width) < reduction))
    reduction /= 2;
  return to_stored(region, height, width, orientation, reduction);
}

/* Returns 1 if the region was decoded; 0 if the file is damaged or of an unsupported kind. `line`
   is memory for one row, which the caller frees. */
static int decode(const Py_buffer *stored, Region region, JSAMPROW pixels,
                  JSAMPROW volatile *line) {
  struct jpeg_decompress_struct info;
  Errors errors;
  info.err = prepare_errors(&errors);
  if (setjmp(errors.out)) {
    jpeg_destroy_decompress(&info);
    return 0;
  }
  jpeg_create_decompress(&info);
  open_file(&info, stored);
  info.out_color_space = JCS_RGB;
  info.scale_num = 1;
  info.scale_denom = region.reduction;
  jpeg_start_decompress(&info);
  if (lacks_scans(&info)) leave((j_common_ptr)&info);
  JDIMENSION top = region.top, left = region.left, right = region.left + region.columns;
  JDIMENSION height = info.output_height, width = info.output_width;
  if (top + region.rows > height || right > width) leave((j_common_ptr)&info);
  JDIMENSION start = left > MARGIN ? left - MARGIN : 0;
  JDIMENSION read_columns = (right + MARGIN < width ? right + MARGIN : width) - start;
  if (read_columns < width) jpeg_crop_scanline(&info, &start, &read_columns);
  *line = PyMem_RawMalloc(3 * (size_t)read_columns);
  if (*line == NULL) leave((j_common_ptr)&info);
  JSAMPROW row = *line;
  size_t row_bytes = 3 * (size_t)region.columns;
  if (top > 0) jpeg_skip_scanlines(&info, top);
  for (int i = 0; i < region.rows; i++) {
    jpeg_read_scanlines(&info, &row, 1);
    memcpy(pixels + i * row_bytes, row + 3 * (left - start), row_bytes);
  }
  if (region.to_end) { /* Reads the last row: skipping to the end would decode nothing. */
    JDIMENSION below = height - info.output_scanline;
    if (below > 1) jpeg_skip_scanlines(&info, below - 1);
    if (below > 0) jpeg_read_scanlines(&info, &row, 1);
    jpeg_finish_decompress(&info);
  }
  jpeg_destroy_decompress(&info);
  return 1;
}

/* The buffers of a tuple of objects, which are released together. */
typedef struct {
  Py_ssize_t count;
  Py_buffer *views;
} Buffers;

static void release(Buffers buffers) {
  for (Py_ssize_t i = 0; i < buffers.count; i++) PyBuffer_Release(&buffers.views[i]);
  PyMem_Free(buffers.views);
}

/* Returns no views and sets an exception if an object has no contiguous buffer. */
static Buffers get_buffers(PyObject *objects, int flags) {
  Buffers buffers = {0, PyMem_New(Py_buffer, PyTuple_GET_SIZE(objects) + 1)};
  if (buffers.views == NULL) PyErr_NoMemory();
  while (buffers.views != NULL && buffers.count < PyTuple_GET_SIZE(objects)) {
    PyObject *object = PyTuple_GET_ITEM(objects, buffers.count);
    if (PyObject_GetBuffer(object, &buffers.views[buffers.count], flags) == 0) {
      buffers.count++;
    } else {
      release(buffers);
      buffers = (Buffers){0, NULL};
    }
  }
  return buffers;
}

static PyObject *find_regions(PyObject *Py_UNUSED(module), PyObject *arguments) {
  PyObject *files;
  Py_buffer keys, regions;
  Crop crop;
  if (!PyArg_ParseTuple(arguments, "O!y*w*(ddddiippd)", &PyTuple_Type, &files, &keys, &regions,
                        &crop.area[0], &crop.area[1], &crop.aspect[0], &crop.aspect[1],
                        &crop.height, &crop.width, &crop.reduced, &crop.exif_rotation,
                        &crop.max_pixels))
    return NULL;
  Buffers stored = get_buffers(files, PyBUF_SIMPLE);
  int fits = keys.len == stored.count * (Py_ssize_t)sizeof(uint64_t);
  fits = fits && regions.len == stored.count * (Py_ssize_t)sizeof(Region);
  fits = fits && crop.height > 0 && crop.width > 0;
  if (stored.views != NULL && !fits)
    PyErr_SetString(PyExc_ValueError, "expected a key and a region for each file");
  if (stored.views != NULL && fits) {
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < stored.count; i++)
      ((Region *)regions.buf)[i] = find_region(&stored.views[i], ((uint64_t *)keys.buf)[i], &crop);
    Py_END_ALLOW_THREADS;
  }
  release(stored);
  PyBuffer_Release(&keys);
  PyBuffer_Release(&regions);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

static int is_possible(Region region, Py_ssize_t bytes) {
  int scale = region.reduction;
  return region.top >= 0 && region.left >= 0 && region.rows > 0 && region.columns > 0 &&
         (scale == 1 || scale == 2 || scale == 4 || scale == 8) &&
         bytes == 3 * (Py_ssize_t)region.rows * region.columns;
}

static PyObject *decode_regions(PyObject *Py_UNUSED(module), PyObject *arguments) {
  PyObject *files, *arrays, *done = NULL;
  Py_buffer regions;
  PyTypeObject *tuple = &PyTuple_Type;
  if (!PyArg_ParseTuple(arguments, "O!y*O!", tuple, &files, &regions, tuple, &arrays)) return NULL;
  Buffers stored = get_buffers(files, PyBUF_SIMPLE);
  Buffers pixels = {0, NULL};
  if (stored.views != NULL) pixels = get_buffers(arrays, PyBUF_WRITABLE);
  if (pixels.views != NULL) {
    int fits = pixels.count == stored.count;
    fits = fits && regions.len == stored.count * (Py_ssize_t)sizeof(Region);
    if (fits) done = PyBytes_FromStringAndSize(NULL, stored.count);
    if (!fits) PyErr_SetString(PyExc_ValueError, "expected as many regions and arrays as files");
  }
  if (done != NULL) {
    char *flags = PyBytes_AS_STRING(done);
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < stored.count; i++) {
      Region region = ((Region *)regions.buf)[i];
      JSAMPROW volatile line = NULL;
      flags[i] = is_possible(region, pixels.views[i].len) &&
                 decode(&stored.views[i], region, pixels.views[i].buf, &line);
      PyMem_RawFree(line);
    }
    Py_END_ALLOW_THREADS;
  }
  release(pixels);
  release(stored);
  PyBuffer_Release(&regions);
  return done;
}

static PyMethodDef functions[] = {
    {"find_regions", find_regions, METH_VARARGS,
     "find_regions(files, keys, regions,\n"
     "             (area, aspect, size, reduced, exif_rotation, max_pixels)):\n"
     "writes a region of int32 per file:\n"
     "(top, left, rows, columns, reduction, to_end, orientation); zeros if it cannot read it"},
    {"decode_regions", decode_regions, METH_VARARGS,
     "decode_regions(files, regions, arrays) -> bytes: decodes into the arrays; a byte is 0 if a\n"
     "file was not decoded"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "jpeg_region", NULL, 0, functions,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_jpeg_region(void) {
  PyObject *made = PyModule_Create(&module);
  if (made != NULL) {
    PyModule_AddStringConstant(made, "version", VERSION(LIBJPEG_TURBO_VERSION));
  }
  return made;
}
