"""Builds the decoder of parts of JPEGs where there are a C compiler and libjpeg-turbo's headers."""

from setuptools import Extension, setup

REGIONS = Extension(
    'vit_jax.data.jpeg_region',
    ['vit_jax/data/jpeg_region.c'],
    libraries=['jpeg'],
    extra_compile_args=['-ffp-contract=off'],  # else regions may differ from Python's
    optional=True,  # whole images are decoded without it
)

if __name__ == '__main__':
    setup(ext_modules=[REGIONS])
