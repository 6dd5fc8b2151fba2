/* Decodes only a region of a JPEG with libjpeg-turbo, for image_decoding.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <setjmp.h>
#include <stdio.h>

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

typedef struct {
  int top, left, rows, columns;
} Region;

/* Returns 1 if the region was decoded; 0 if the file is damaged or of an unsupported kind.

   The region is in pixels of the image reduced by `reduction`. Damage below the region is detected
   only if `to_end` is set. `line` is memory for one row, which the caller frees. */
static int decode(const Py_buffer *stored, Region region, int reduction, int to_end,
                  JSAMPROW pixels, JSAMPROW volatile *line) {
  struct jpeg_decompress_struct info;
  Errors errors;
  info.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = leave;
  errors.base.emit_message = on_message;
  if (setjmp(errors.out)) {
    jpeg_destroy_decompress(&info);
    return 0;
  }
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, stored->buf, (unsigned long)stored->len);
  jpeg_read_header(&info, TRUE);
  J_COLOR_SPACE kind = info.jpeg_color_space;
  int plain = kind == JCS_YCbCr || kind == JCS_GRAYSCALE || kind == JCS_RGB;
  if (!plain || info.data_precision != 8) leave((j_common_ptr)&info);
  info.out_color_space = JCS_RGB;
  info.scale_num = 1;
  info.scale_denom = reduction;
  jpeg_start_decompress(&info);
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
  if (to_end) { /* The last row is read: skipping to the end of the image would decode nothing. */
    JDIMENSION below = height - info.output_scanline;
    if (below > 1) jpeg_skip_scanlines(&info, below - 1);
    if (below > 0) jpeg_read_scanlines(&info, &row, 1);
    jpeg_finish_decompress(&info);
  }
  jpeg_destroy_decompress(&info);
  return 1;
}

static PyObject *decode_into(PyObject *Py_UNUSED(module), PyObject *arguments) {
  Py_buffer stored, pixels;
  Region region;
  int reduction, to_end, done = 0;
  if (!PyArg_ParseTuple(arguments, "y*w*(iiii)ip", &stored, &pixels, &region.top, &region.left,
                        &region.rows, &region.columns, &reduction, &to_end))
    return NULL;
  int fits = region.top >= 0 && region.left >= 0 && region.rows > 0 && region.columns > 0;
  fits = fits && (reduction == 1 || reduction == 2 || reduction == 4 || reduction == 8);
  if (fits && pixels.len == 3 * (Py_ssize_t)region.rows * region.columns) {
    JSAMPROW volatile line = NULL;
    Py_BEGIN_ALLOW_THREADS;
    done = decode(&stored, region, reduction, to_end, pixels.buf, &line);
    PyMem_RawFree(line);
    Py_END_ALLOW_THREADS;
  }
  PyBuffer_Release(&stored);
  PyBuffer_Release(&pixels);
  return PyBool_FromLong(done);
}

static PyMethodDef functions[] = {
    {"decode_into", decode_into, METH_VARARGS,
     "decode_into(stored, pixels, (top, left, rows, columns), reduction, to_end) -> bool"},
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
